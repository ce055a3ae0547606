"""Sends a file of requests to a server as a batch, and follows the batch across reconnects."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from headrace.client.errors import Refused, Unreachable
from headrace.client.http import (
    LOST,
    TIMEOUT,
    direct_transport,
    key_header,
    reason_of,
    to_address,
    to_object,
)
from headrace.client.pacing import MEND_THEMSELVES, refusal
from headrace_common.errors import ConfigError

POLL_S = 1.0
ENDED = ("completed", "failed", "expired", "cancelled")
_ON_ITS_WAY = ("validating", "in_progress", "finalizing", "completed")
_SENDING_S = 600.0
_PAGE = 100


class BatchClient:
    """A client of one server's batches.

    Before each wait, `on_trouble` is called with the reason and the number of seconds.
    """

    def __init__(
        self, url: str, api_key: str | None, on_trouble: Callable[[str, float], None]
    ) -> None:
        address = to_address(url)
        self._http = httpx.Client(
            base_url=address,
            headers=key_header(api_key),
            timeout=TIMEOUT,
            transport=direct_transport(address),
        )
        self._on_trouble = on_trouble

    def __enter__(self) -> "BatchClient":
        return self

    def __exit__(self, *failure: object) -> None:
        self._http.close()

    def begun(self, digest: str) -> dict[str, Any] | None:
        """Return the batch of the file with this digest, unless it failed or was cancelled."""
        after: dict[str, str] = {}
        while True:
            found = self.ask("GET", "/v1/batches", params={"limit": str(_PAGE), **after})
            for batch in found["data"]:
                is_same = (batch["metadata"] or {}).get("sha256") == digest
                if is_same and batch["status"] in _ON_ITS_WAY:
                    return dict(batch)
            if not found["has_more"]:
                return None
            after = {"after": found["last_id"]}

    def begin(self, path: Path, digest: str, hours: int) -> dict[str, Any]:
        """Upload a file and create its batch."""
        with path.open("rb") as file:
            sent = self.ask(
                "POST", "/v1/files", data={"purpose": "batch"},
                files={"file": (path.name, file)}, timeout=_SENDING_S,
            )  # fmt: skip
        wish = {
            "input_file_id": sent["id"],
            "endpoint": route_of(path),
            "completion_window": f"{hours}h",
            "metadata": {"sha256": digest, "file": path.name[:512]},
        }
        return self.ask("POST", "/v1/batches", json=wish)

    def follow(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the batch whenever it changes, until it has ended. Retry if no server answers."""
        while True:
            yield batch
            if batch["status"] in ENDED:
                return
            time.sleep(POLL_S)
            try:
                batch = self.ask("GET", f"/v1/batches/{batch['id']}")
            except (Unreachable, Refused) as error:
                self._bear(error)

    def cancel(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.ask("POST", f"/v1/batches/{batch['id']}/cancel")

    def results(self, file_id: str | None) -> Iterator[bytes]:
        """Yield each byte of a results file once, even if connections are lost.

        Yields nothing if `file_id` is None.
        """
        num_given = 0
        while file_id is not None:
            try:
                for piece in self._content(file_id, num_given):
                    num_given += len(piece)
                    yield piece
                return
            except (Unreachable, Refused) as error:
                self._bear(error)
                time.sleep(POLL_S)

    def _content(self, file_id: str, start: int) -> Iterator[bytes]:
        place = 0
        try:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
                if answer.status_code != 200:
                    raise refusal(answer.status_code, answer.read())
                for piece in answer.iter_bytes():
                    yield piece[max(0, start - place) :]
                    place += len(piece)
        except LOST as error:
            raise Unreachable(reason_of(error)) from error

    def _bear(self, error: Unreachable | Refused) -> None:
        """Report an error that can be temporary; raise any other error."""
        if isinstance(error, Refused) and error.status not in MEND_THEMSELVES:
            raise error
        self._on_trouble(str(error), POLL_S)

    def ask(self, method: str, path: str, **sent: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises Refused or Unreachable."""
        try:
            answer = self._http.request(method, path, **sent)
        except LOST as error:
            raise Unreachable(reason_of(error)) from error
        if answer.status_code != 200:
            raise refusal(answer.status_code, answer.content)
        return to_object(answer.content)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def route_of(path: Path) -> str:
    """Return the `url` of the file's first line. All lines must have the same `url`."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise ConfigError(
            f"{path}: the first line is not a request; a line is "
            '{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}.'
        )
    return url
