"""Detects that the files of a model have changed."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.text.model_names import adapters_of
from headrace_common.checkpoints.find import place_of
from headrace_common.config.settings import ModelConfig

_MAX_FILES = 1000  # of a folder and its subfolders

Stamp = tuple[tuple[int, ...], ...]


def file_stamp(config: ModelConfig) -> Stamp | None:
    """Return a value that changes with the files of a model, its adapters and its template.

    Return None if the model is not on this machine. Only the first files of a huge folder count.
    """
    place = place_of(config.model)
    if place is None or not place.exists():
        return None
    # A GGUF file may have further parts beside it.
    folders = [place if place.is_dir() else place.parent, *map(Path, adapters_of(config).values())]
    files = [*folders, Path(config.chat_template)] if config.chat_template else folders
    found: set[tuple[int, ...]] = set()
    for file in files:
        for path in itertools.islice(_within(str(file)), _MAX_FILES):
            found |= _facts(path)
    return tuple(sorted(found))


def _within(path: str, depth: int = 1) -> Iterator[str]:
    """Yield a path, and the paths in it and in its subfolders if it is a folder."""
    yield path
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            for entry in entries:
                if depth and entry.is_dir():
                    yield from _within(entry.path, depth - 1)
                else:
                    yield entry.path
    except (OSError, ValueError):  # it is a file, or the text is not a path
        return


def _facts(path: str) -> set[tuple[int, ...]]:
    """Return the file's identity, size and times; for a link, also those of its target."""
    found: set[tuple[int, ...]] = set()
    for follows in (False, True):
        try:
            it = os.stat(os.path.expanduser(path), follow_symlinks=follows)
        except (OSError, ValueError):
            continue
        found.add((it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns))
    return found
