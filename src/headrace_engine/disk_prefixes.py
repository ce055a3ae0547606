"""Connects a loaded model to a folder of cached prefixes on disk, if a folder is configured."""

import logging
import os
import queue
import threading
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace_common.cache import ModelCache
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import PrefixCacheConfig
from headrace_common.errors import ModelError
from headrace_common.messages import Ready
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import Memory
from headrace_engine.prefixes.folder import About, PrefixFolder, StoredSegment, make_own
from headrace_engine.prefixes.keeper import DiskSite, PrefixKeeper
from headrace_engine.prefixes.place import AUTO, NONE, default_folder, objection
from headrace_engine.runner.block_bytes import BlockBytes
from headrace_engine.runner.runner import Runner

logger = logging.getLogger(__name__)

SEGMENT_TOKENS, SEGMENT_BYTES = 256, 32 << 20
"""The limits of a segment, in tokens and in bytes.

The limits are low enough that a step can load a segment without stalling streams. The limits
are also high enough that segments are read at the disk's full speed.
"""
# Seconds that a model load waits for the list of stored segments. If the list takes longer, the
# engine gets it in a SegmentsOnDisk message.
_LIST_S = 3.0


class DiskPart(NamedTuple):
    """Holds the objects that store a model's cached prefixes on disk."""

    site: DiskSite
    numbers: BlockBytes
    # The scheduler's list of segments. The keeper has a separate copy.
    known: DiskPrefixes

    def keeper(self, memory: Memory) -> PrefixKeeper:
        return PrefixKeeper(self.site, self.numbers, memory)


def disk_part(
    config: PrefixCacheConfig, model: str, runner: Runner, ready: Ready
) -> DiskPart | None:
    """Return the disk part; None if no folder is configured or the lane has no blocks to save.

    Raise ModelError if a folder that the user has named cannot be used.
    """
    if not config.prefix_cache_dir or config.prefix_cache_dir == NONE:
        return None
    storage = runner.lane.storage
    if storage is None or runner.numbers is None:
        logger.info(
            "Cached prefixes are not saved to disk: lane %s on %s does not support saving.",
            ready.lane,
            ready.device,
        )
        return None
    described = about(model, ready, storage.cache)
    if config.prefix_cache_dir == AUTO:
        folder = _default(described)
    else:
        folder = _named(Path(config.prefix_cache_dir).expanduser(), described)
    if folder is None:
        return None
    numbers, found = runner.numbers, _stored(folder)
    known, kept = _disk_prefixes(ready, numbers), _disk_prefixes(ready, numbers)
    known.set_segments(found)
    kept.set_segments(found)
    site = DiskSite(folder, config, kept, numbers.slot_bytes > 0)
    return DiskPart(site, numbers, known)


def _default(described: About) -> PrefixFolder | None:
    """Open the default folder. If that is impossible, log the reason and return None."""
    try:
        root = default_folder()
        why = objection(root)
        if not why:
            make_own(root)
            folder = PrefixFolder(root, described)
            folder.open()
            logger.info(
                "Cached prefixes are stored in %s, readable only by this user; "
                "--prefix-cache-dir none turns this off.",
                root,
            )
            return folder
        why = f"{root} {why}"
    except (OSError, RuntimeError) as error:
        why = str(error)
    logger.info("Cached prefixes are not stored: %s. Set --prefix-cache-dir to a folder.", why)
    return None


def _named(root: Path, described: About) -> PrefixFolder:
    folder = PrefixFolder(root, described)
    try:
        folder.open()
    except OSError as error:
        raise ModelError(
            f"--prefix-cache-dir: the folder {root} cannot be used ({error.strerror}). Give "
            "another folder, or the word none."
        ) from None
    return folder


def about(model: str, ready: Ready, cache: ModelCache) -> About:
    # The files also have the draft model's part of each block.
    draft = f" {ready.draft.fingerprint}" if ready.draft else ""
    return About(
        model=model,
        fingerprint=ready.fingerprint + draft,
        lane=ready.lane,
        dtype=ready.dtype,
        kernels=ready.kernels,
        block_size=ready.layout.block_size,
        cache=msgspec.json.encode(cache).decode(),
        libraries=f"torch {version('torch')}, transformers {version('transformers')}",
        weights=_stamps(Path(model)),
    )


def _stamps(folder: Path) -> str:
    found = (os.stat(folder / name) for name in read_spec(folder).weight_files)
    return ", ".join(f"{stat.st_size} {stat.st_mtime_ns}" for stat in found)


def _disk_prefixes(ready: Ready, numbers: BlockBytes) -> DiskPrefixes:
    size = ready.layout.block_size
    num_blocks = max(1, min(SEGMENT_TOKENS // size, SEGMENT_BYTES // numbers.block_bytes))
    # In a model with recurrent states, a segment also needs the state at the segment's end. States
    # are saved only where snapshots are taken, so segments end at these positions.
    if numbers.slot_bytes:
        num_blocks = ready.layout.snapshot_every // size
    return DiskPrefixes(size, num_blocks, numbers.block_bytes, numbers.slot_bytes)


def _stored(folder: PrefixFolder) -> list[StoredSegment]:
    found: queue.SimpleQueue[list[StoredSegment]] = queue.SimpleQueue()

    def look() -> None:
        try:
            found.put(folder.stored())
        except OSError as error:
            logger.warning(
                "The folder of cached prefixes, %s, cannot be read: %s", folder.path, error
            )

    threading.Thread(target=look, name="prefix-list", daemon=True).start()
    try:
        return found.get(timeout=_LIST_S)
    except queue.Empty:
        return []
