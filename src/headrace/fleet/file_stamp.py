"""Detects changes to the files of a model."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.text.model_names import adapters_of
from headrace_common.checkpoints.find import draft_model, place_of
from headrace_common.config.settings import ModelConfig

# Maximum number of checked paths per folder, including the paths in subfolders.
_MAX_FILES = 1000

Stamp = tuple[tuple[int, ...], ...]


def file_stamp(config: ModelConfig) -> Stamp | None:
    """Return a value that changes when a file of the model changes.

    Files of adapters, the draft model, the chat template and the vision part count too. Returns
    None if the model is not on this machine. In each folder, only the first `_MAX_FILES` paths
    count.
    """
    place = place_of(config.model)
    if place is None or not place.exists():
        return None
    # A GGUF model may consist of several files, so all files of the folder count.
    folders = [place if place.is_dir() else place.parent, *map(Path, adapters_of(config).values())]
    model = draft_model(config.draft)
    if model is not None and (draft := place_of(model)) is not None:
        folders.append(draft if draft.is_dir() else draft.parent)
    files = [*folders, Path(config.chat_template)] if config.chat_template else folders
    if config.mmproj not in ("auto", "none"):
        files = [*files, Path(config.mmproj)]
    found: set[tuple[int, ...]] = set()
    for file in files:
        for path in itertools.islice(_within(str(file)), _MAX_FILES):
            found |= _facts(path)
    return tuple(sorted(found))


def _within(path: str, depth: int = 1) -> Iterator[str]:
    """Yield a path. If the path is a folder, also yield the paths in it and in its subfolders."""
    yield path
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            for entry in entries:
                if depth and entry.is_dir():
                    yield from _within(entry.path, depth - 1)
                else:
                    yield entry.path
    # The path is a file, does not exist or is not a valid path.
    except (OSError, ValueError):
        return


def _facts(path: str) -> set[tuple[int, ...]]:
    """Return the identity, size and times of a file.

    For a link, the result also has the values of the link's target.
    """
    found: set[tuple[int, ...]] = set()
    for follows in (False, True):
        try:
            it = os.stat(os.path.expanduser(path), follow_symlinks=follows)
        except (OSError, ValueError):
            continue
        found.add((it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns))
    return found
