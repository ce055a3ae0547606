"""Weights of a hub on their way into its cache: a file that was cut goes on where it stopped.

The hub's own library begins a cut file anew. It finds these whole, and links them into a snapshot.
"""

import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.errors import ModelError

_TRIES = 5  # in a row that bring nothing
_PAUSE_S = 1.0
_PARTIAL = 206
_SHA256 = re.compile("[0-9a-f]{64}")


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


def hub_file(repo: str, commit: str, name: str) -> HubFile:
    """Asks the hub for a file's hash and size."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name, revision=commit)
    found = get_hf_file_metadata(url)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    return HubFile(url, folder / "blobs" / (found.etag or ""), found.size or 0)


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
        num_failures = 0
        while file.num_here < file.num_bytes or not file.part.exists():
            before = file.num_here
            try:
                _read_on(file)
            except Exception:  # a transport, whose errors are of many kinds; or a disk
                num_failures = 1 if file.num_here > before else num_failures + 1
                if num_failures == _TRIES:
                    raise
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
        for chunk in answer.iter_bytes():
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
        raise ModelError(
            "What came of the hub is not what it names by its hash; nothing of that file is "
            "kept: try again.",
            "download_failed",
        )
