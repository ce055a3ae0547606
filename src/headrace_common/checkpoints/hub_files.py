"""Weights of a hub on their way into its cache: a file that was cut goes on where it stopped.

The hub's own library begins a cut file anew. It finds these whole, and links them into a snapshot.
"""

import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from headrace_common.errors import ModelError

_TRIES = 5  # in a row that bring nothing
_PAUSE_S = 1.0
_SLOW_S, _SLOW_BYTES = 30.0, 30 << 10  # a download that receives less in that time is stopped
_PARTIAL = 206
_SHA256 = re.compile("[0-9a-f]{64}")
_COMMIT = re.compile("[0-9a-f]{40}")
_HASH = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


class HubFile(NamedTuple):
    """One file; `blob` is its place in the cache, by the hash of its content."""

    url: str
    blob: Path
    num_bytes: int

    @property
    def part(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.part")

    @property
    def num_here(self) -> int:
        """Bytes that an earlier download left."""
        return self.part.stat().st_size if self.part.exists() else 0


def is_commit(stated: object) -> bool:
    """Whether that is the full hash of a commit."""
    return isinstance(stated, str) and bool(_COMMIT.fullmatch(stated))


def hub_file(repo: str, commit: str, name: str, num_bytes: int) -> HubFile:
    """Ask the hub for a file's hash and size; `num_bytes` is what it listed.

    The hash becomes a file's name, so ModelError if it cannot be one.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name, revision=commit)
    found = get_hf_file_metadata(url)
    etag = found.etag or ""
    if not _HASH.fullmatch(etag) or (found.commit_hash or commit) != commit:
        message = f"The hub's answer for the file {name!r} has no usable hash; try again later."
        raise ModelError(message, "download_failed")
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    return HubFile(url, folder / "blobs" / etag, num_bytes if found.size is None else found.size)


def fetch_file(file: HubFile) -> None:
    """Brings the file, or what is missing of it; one that is there stays.

    Another process that fetches it is waited for. ModelError if its hash is another.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(file.part.with_suffix(".lock")):
        if file.blob.exists():
            return
        if file.num_here > file.num_bytes:
            file.part.unlink()
        num_vain = 0
        while file.num_here < file.num_bytes or not file.part.exists():
            before, failure = file.num_here, None
            try:
                _read_on(file)
            except ModelError:
                raise
            except Exception as error:  # a transport, whose errors are of many kinds; or a disk
                failure = error
            num_vain = 0 if file.num_here > before else num_vain + 1
            if num_vain == _TRIES:
                raise failure or ModelError(_NOTHING_MORE, "download_failed")
            if failure or num_vain:
                time.sleep(_PAUSE_S)
        _check_hash(file)
        os.replace(file.part, file.blob)


def _read_on(file: HubFile) -> None:
    """Appends what one connection brings, as it comes."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    wanted = {"Range": f"bytes={file.num_here}-", "Accept-Encoding": "identity"}
    asked = get_session().stream(
        "GET",
        file.url,
        headers=build_hf_headers() | wanted,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        follow_redirects=True,
    )
    with asked as answer, file.part.open("ab", buffering=0) as out:
        hf_raise_for_status(answer)
        if answer.status_code != _PARTIAL:  # it has sent all of it
            out.truncate(0)
        left = file.num_bytes - file.num_here
        began, left_then = time.monotonic(), left
        for chunk in answer.iter_bytes():
            left -= len(chunk)
            if (now := time.monotonic()) > began + _SLOW_S:
                if left_then - left < _SLOW_BYTES:
                    raise ModelError(_TOO_SLOW, "download_failed")
                began, left_then = now, left
            if left < 0:
                file.part.unlink()
                raise ModelError(_TOO_MUCH, "download_failed")
            out.write(chunk)


def no_bar() -> Any:
    """The class of a progress bar of the hub's library that shows nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _check_hash(file: HubFile) -> None:
    """The hub names large files by their SHA-256; a wrong one begins anew the next time."""
    if not _SHA256.fullmatch(file.blob.name):
        return
    with file.part.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != file.blob.name:
        file.part.unlink()
        raise ModelError(_WRONG_HASH, "download_failed")


_WRONG_HASH = "A downloaded file does not match the hub's hash and was discarded; try again."
_TOO_MUCH = "A file of the hub is larger than its stated size and was discarded; try again."
_TOO_SLOW = (
    f"The hub sent less than {_SLOW_BYTES >> 10} KiB in {_SLOW_S:g} s, so the download was "
    "stopped. What was received is kept; try again later."
)
_NOTHING_MORE = "The hub stopped sending a file before its end; try again later."
