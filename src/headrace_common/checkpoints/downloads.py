"""Lists and removes models that were downloaded from the hub or as packages."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace_common.checkpoints.catalog import catalog, hub_id_of
from headrace_common.checkpoints.gguf_file_names import labels
from headrace_common.checkpoints.gguf_folder import model_files
from headrace_common.checkpoints.package_index import PACKAGED, packaged_file, packaged_folder
from headrace_common.errors import ModelError


class Downloaded(NamedTuple):
    """A downloaded model. `headrace serve` accepts both `name` and `folder`.

    `came_at` is in seconds since 1970.
    """

    name: str
    num_bytes: int
    came_at: float
    folder: Path


def downloads() -> list[Downloaded]:
    """Return the downloaded models, newest first."""
    return sorted((*_packaged(), *_of_hub()), key=lambda it: it.came_at, reverse=True)


def remove(name: str) -> Downloaded:
    """Remove a model and return the removed model. Raises ModelError if no model has this name.

    A short name of the catalog stands for all files of its repository. Raises ModelError too if a
    name with a quantization would remove other files.
    """
    repo, has_file, _ = hub_id_of(name).partition(":")
    for found in downloads():
        if found.name in (name, repo):
            files = labels(it.name for it in model_files(found.folder))
            if has_file and name not in catalog() and len(files) > 1:
                raise ModelError(
                    f"{repo} has {len(files)} GGUF files ({', '.join(files.values())}), which can "
                    f"only be removed together: headrace rm {repo}"
                )
            shutil.rmtree(_place(found.name))
            return found
    raise ModelError(
        f"No downloaded model is named {name!r}; `headrace ls` lists the names.",
        "model_not_found",
    )


def discard(name: str) -> None:
    """Remove all files of a hub id or a package, including files of an incomplete download."""
    shutil.rmtree(_place(name), ignore_errors=True)


def _place(name: str) -> Path:
    """Return the folder with all files and revisions of a hub id or a package."""
    from huggingface_hub import constants

    if name in PACKAGED:
        return packaged_folder(name)
    repo = hub_id_of(name).partition(":")[0]
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _packaged() -> Iterator[Downloaded]:
    for name in PACKAGED:
        if (file := packaged_file(name)) is not None:
            facts = file.stat()
            yield Downloaded(name, facts.st_size, facts.st_ctime, file.parent.resolve())


def _of_hub() -> Iterator[Downloaded]:
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type == "model":
            newest = max(
                repo.revisions, key=lambda it: ("main" in it.refs, it.last_modified), default=None
            )
            folder = repo.repo_path if newest is None else newest.snapshot_path
            yield Downloaded(repo.repo_id, repo.size_on_disk, repo.last_modified, folder)
