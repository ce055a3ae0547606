"""Models that were downloaded, out of packages and from a hub: listed, and removed again."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace_common.checkpoints.packaged import PACKAGED, packaged_file, packaged_folder
from headrace_common.errors import ModelError


class Downloaded(NamedTuple):
    """One of them; `name` is what serve takes, `came_at` in seconds since 1970."""

    name: str
    num_bytes: int
    came_at: float
    folder: Path


def downloads() -> list[Downloaded]:
    """The models that are here, the last one that came first."""
    return sorted((*_packaged(), *_of_hub()), key=lambda it: it.came_at, reverse=True)


def remove(name: str) -> Downloaded:
    """The one that was removed; ModelError if none has that name."""
    for found in downloads():
        if found.name == name:
            shutil.rmtree(found.folder)
            return found
    raise ModelError(
        f"No model {name!r} was downloaded; `headrace models downloaded` lists those that were.",
        "model_not_found",
    )


def discard(name: str) -> None:
    """Removes all there is of a hub id or a package's name, the begin of a download too."""
    from huggingface_hub import constants

    if name in PACKAGED:
        folder = packaged_folder(name)
    else:
        folder = (
            Path(constants.HF_HUB_CACHE) / f"models--{name.partition(':')[0].replace('/', '--')}"
        )
    shutil.rmtree(folder, ignore_errors=True)


def _packaged() -> Iterator[Downloaded]:
    for name in PACKAGED:
        if (file := packaged_file(name)) is not None:
            facts = file.stat()
            yield Downloaded(name, facts.st_size, facts.st_ctime, file.parent)


def _of_hub() -> Iterator[Downloaded]:
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type == "model":
            yield Downloaded(repo.repo_id, repo.size_on_disk, repo.last_modified, repo.repo_path)
