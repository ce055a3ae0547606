"""Sends requests one at a time and records each answer, except for what differs in every run."""

import contextlib
import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from stress.recording.rules import HEADER_RULES, VIEWS, frames, normalise
from tools.harness.eventually import eventually

LIMIT_S, SILENCE_S = 120, 20
JSON = {"Content-Type": "application/json"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        """The stream's id."""
        return self.headers["x-stream-id"]


class Recording:
    """A file with one JSON object per answer. Answers with the same name are numbered."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._section = ""
        self.num_answers = 0
        self._counts: dict[str, int] = {}

    def section(self, name: str) -> None:
        self._section = name

    def add(self, label: str, **fields: Any) -> None:
        name = f"{self._section}: {label}"
        count = self._counts[name] = self._counts.get(name, 0) + 1
        line = {"name": f"{name} ({count})" if count > 1 else name, **fields}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()
        self.num_answers += 1

    def close(self) -> None:
        self._file.close()


class Session:
    """A client of one server. `headers` are sent with each request."""

    def __init__(self, url: str, recording: Recording, **headers: str) -> None:
        self._address = urlsplit(url).netloc
        self.recording = recording
        self._headers = headers

    def post(self, path: str, body: Any = None, label: str = "", **headers: str) -> Answer:
        """POST a body as JSON; bytes are sent as they are."""
        return self.ask("POST", path, body, label, JSON | headers)

    def get(self, path: str, label: str = "", view: str = "whole", **headers: str) -> Answer:
        return self.ask("GET", path, None, label, headers, view)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        label: str = "",
        headers: dict[str, str] = {},  # noqa: B006
        view: str = "whole",
    ) -> Answer:
        answer = self.fetch(method, path, body, headers)
        media = answer.headers.get("content-type", "").partition(";")[0]
        text = answer.body.decode(errors="backslashreplace")
        if answer.status == 200:
            text = VIEWS[view](text)
        whole = frames(normalise(text), media)
        told = [[name, self._value(name, value, answer)] for name, value in self._told]
        self.recording.add(
            f"{method} {normalise(path)} {label}".strip(),
            status=self._status,
            headers=told,
            body=whole,
        )
        return answer

    def fetch(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] = {},  # noqa: B006
    ) -> Answer:
        """Send a request without writing the answer down."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in (self._headers | headers).items()}
        connection = http.client.HTTPConnection(self._address, timeout=LIMIT_S)
        try:
            connection.request(method, path, data, sent)
            reply = connection.getresponse()
            self._told = reply.getheaders()
            self._status = f"{reply.status} {reply.reason}"
            known = {name.lower(): value for name, value in self._told}
            return Answer(reply.status, known, reply.read())
        finally:
            connection.close()

    def begin(self, path: str, body: Any, num_bytes: int, **headers: str) -> bytes:
        """Read the first bytes of an answer, and disconnect."""
        sent = {name.replace("_", "-"): value for name, value in (JSON | headers).items()}
        connection = http.client.HTTPConnection(self._address, timeout=LIMIT_S)
        connection.request("POST", path, json.dumps(body).encode(), sent | self._headers)
        got = connection.getresponse().read(num_bytes)
        connection.close()
        return got

    def until(self, path: str, is_so: Callable[[Any], bool]) -> None:
        """Repeat a request until `is_so` accepts its JSON, without writing the answers down."""
        eventually(lambda: is_so(self.fetch("GET", path).json), LIMIT_S)

    def talk(
        self, label: str, *messages: Any, path: str = "/v1/realtime-text", **headers: str
    ) -> None:
        """Send messages on a WebSocket, and write down its frames until a request has ended."""
        url = f"ws://{self._address}{path}"
        came: list[str] = []
        try:
            with connect(
                url, additional_headers=self._headers | headers, compression=None
            ) as socket:
                for message in messages:
                    is_raw = isinstance(message, str | bytes)
                    # The server closes the connection after it has sent the reason.
                    with contextlib.suppress(ConnectionClosed):
                        socket.send(message if is_raw else json.dumps(message))
                while not (came and _ends(came[-1])):
                    came.append(str(socket.recv(timeout=SILENCE_S)))
        except Exception as error:
            came.append(f"{type(error).__name__}: {error}")
        self.recording.add(label, body=frames(normalise("\n".join(came)), "application/x-ndjson"))

    def _value(self, name: str, value: str, answer: Answer) -> str:
        if name.lower() in HEADER_RULES:
            return "<any>"
        # Random values in the body differ in their number of digits, so the body's length may
        # differ.
        if name.lower() == "content-length":
            is_right = not answer.body or int(value) == len(answer.body)
            return "<right>" if is_right else value
        return normalise(f" {value}")[1:]


def _ends(frame: str) -> bool:
    given = json.loads(frame)
    kind = given.get("event", {}).get("kind")
    return given["type"] == "error" or kind in ("finish", "error") or given["type"] == "done"
