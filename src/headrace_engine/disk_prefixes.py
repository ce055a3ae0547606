"""Joins a loaded model with its folder of prefixes on disk, if it has one."""

import logging
import queue
import threading
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace_common.cache import ModelCache
from headrace_common.config.settings import PrefixCacheConfig
from headrace_common.errors import ModelError
from headrace_common.messages import Ready
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import Memory
from headrace_engine.prefixes.folder import About, PrefixFolder, StoredRun
from headrace_engine.prefixes.keeper import DiskSite, PrefixKeeper
from headrace_engine.runner.block_bytes import BlockBytes
from headrace_engine.runner.runner import Runner

logger = logging.getLogger(__name__)

RUN_TOKENS, RUN_BYTES = 256, 32 << 20
"""A run has as many blocks as fit both: small enough to load beside streams in one step, large
enough that a disk reads it at full speed."""
_LIST_S = 3.0  # that a load waits for the list of a slow disk; it comes later then


class DiskPart(NamedTuple):
    """A model's prefixes on disk."""

    site: DiskSite
    numbers: BlockBytes
    known: DiskPrefixes  # to the scheduler

    def keeper(self, memory: Memory) -> PrefixKeeper:
        return PrefixKeeper(self.site, self.numbers, memory)


def disk_part(
    config: PrefixCacheConfig, model: str, runner: Runner, ready: Ready
) -> DiskPart | None:
    """None without a folder, or where the lane has nothing to keep; ModelError if it is no use."""
    if config.prefix_cache_dir is None:
        return None
    storage = runner.lane.storage
    if storage is None or runner.numbers is None:
        logger.info("Lane %s on %s keeps no prefixes on disk.", ready.lane, ready.device)
        return None
    root = Path(config.prefix_cache_dir).expanduser()
    folder = PrefixFolder(root, about(model, ready, storage.cache))
    try:
        folder.open()
    except OSError as error:
        raise ModelError(
            f"--prefix-cache-dir: {root} cannot be used: {error.strerror}; give another folder, or "
            "leave it out."
        ) from None
    numbers, found = runner.numbers, _stored(folder)
    known, kept = _disk_prefixes(ready, numbers), _disk_prefixes(ready, numbers)
    known.know(found)
    kept.know(found)
    site = DiskSite(folder, config, kept, numbers.slot_bytes > 0)
    return DiskPart(site, numbers, known)


def about(model: str, ready: Ready, cache: ModelCache) -> About:
    return About(
        model=model,
        fingerprint=ready.fingerprint,
        lane=ready.lane,
        dtype=ready.dtype,
        kernels=ready.kernels,
        block_size=ready.layout.block_size,
        cache=msgspec.json.encode(cache).decode(),
        libraries=f"torch {version('torch')}, transformers {version('transformers')}",
    )


def _disk_prefixes(ready: Ready, numbers: BlockBytes) -> DiskPrefixes:
    size = ready.layout.block_size
    num_blocks = max(1, min(RUN_TOKENS // size, RUN_BYTES // numbers.block_bytes))
    if numbers.slot_bytes:  # a state belongs to each run
        num_blocks = ready.layout.snapshot_every // size
    return DiskPrefixes(size, num_blocks, numbers.block_bytes, numbers.slot_bytes)


def _stored(folder: PrefixFolder) -> list[StoredRun]:
    found: queue.SimpleQueue[list[StoredRun]] = queue.SimpleQueue()

    def look() -> None:
        try:
            found.put(folder.stored())
        except OSError as error:
            logger.warning("%s cannot be read: %s.", folder.path, error)

    threading.Thread(target=look, name="prefix-list", daemon=True).start()
    try:
        return found.get(timeout=_LIST_S)
    except queue.Empty:
        return []
