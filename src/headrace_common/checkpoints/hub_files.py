"""Downloads weight files into the hub's cache, and continues interrupted downloads.

The hub's own library would download an interrupted file from the start. The library finds the
complete files in the cache and links the files into a snapshot.
"""

import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from headrace_common.errors import ModelError

_TRIES = 5  # consecutive tries without progress
_PAUSE_S = 1.0
# A download that receives less than _SLOW_BYTES in _SLOW_S is stopped.
_SLOW_S, _SLOW_BYTES = 30.0, 30 << 10
_PARTIAL = 206
_SHA256 = re.compile("[0-9a-f]{64}")
_COMMIT = re.compile("[0-9a-f]{40}")
_HASH = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


class HubFile(NamedTuple):
    """A file of the hub. `blob` is the file's path in the cache.

    The blob's name is the hash of the content.
    """

    url: str
    blob: Path
    num_bytes: int

    @property
    def part(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.part")

    @property
    def num_here(self) -> int:
        """The number of bytes from an earlier download."""
        return self.part.stat().st_size if self.part.exists() else 0


def is_commit(stated: object) -> bool:
    """Whether the value is the full hash of a commit."""
    return isinstance(stated, str) and bool(_COMMIT.fullmatch(stated))


def hub_file(repo: str, commit: str, name: str, num_bytes: int) -> HubFile:
    """Ask the hub for a file's hash and size. `num_bytes` is the size in the hub's listing.

    The hash becomes a file name. So an answer without a valid hash raises ModelError.
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
    """Download a file or its missing part. Does nothing if the file is complete.

    Waits while another process downloads the file. Raises ModelError if the file's hash is wrong.
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
            # The network or the disk failed. Network errors have many types.
            except Exception as error:
                failure = error
            num_vain = 0 if file.num_here > before else num_vain + 1
            if num_vain == _TRIES:
                raise failure or ModelError(_NOTHING_MORE, "download_failed")
            if failure or num_vain:
                time.sleep(_PAUSE_S)
        _check_hash(file)
        os.replace(file.part, file.blob)


def _read_on(file: HubFile) -> None:
    """Append the bytes of one HTTP response to the partial file while they arrive."""
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
        # The server ignored the range and sends the whole file.
        if answer.status_code != _PARTIAL:
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
    """Return a silent class that replaces the library's progress bar."""
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _check_hash(file: HubFile) -> None:
    """Compare a large file with the SHA-256 in its name.

    A wrong file is removed, so that the next try starts from an empty file.
    """
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
    "stopped. The received part is kept; try again later."
)
_NOTHING_MORE = "The hub stopped sending a file before its end; try again later."
