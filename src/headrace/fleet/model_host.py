"""One model a server runs: its settings, what was read of it, its engine and its tenants."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from headrace.engines.client import EngineClient
from headrace.fleet.engine_life import EngineLife
from headrace.fleet.fetch_apart import fetch_apart
from headrace.fleet.file_stamp import Stamp, file_stamp
from headrace.fleet.in_thread import start_thread
from headrace.fleet.load_watch import LoadWatch
from headrace.fleet.model_check import NotChecked, read_checked
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import Tenants
from headrace.metrics.metrics import Metrics
from headrace.text.model_names import adapters_of, names_of, paths_of, root_of
from headrace_common.adapter import Adapter
from headrace_common.checkpoints.find import MINI, find_model, may_have_images
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_common.loading import READING
from headrace_common.messages import Ready

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30
"""Memory of each model for keys and values, where it is budgeted and settings say nothing."""

Start = Callable[[ModelConfig], EngineClient]

_REMEMBERED_S = 600.0  # the cause may not be in the files: a full disk, for example


class _Failure(NamedTuple):
    """The reason why a model could not be read, and the state of its files then."""

    files: ModelConfig
    stamp: Stamp | None
    code: str
    message: str
    ends: float  # monotonic

    def holds(self) -> bool:
        """Whether the files are still the same, and the failure is not old."""
        return time.monotonic() < self.ends and file_stamp(self.files) == self.stamp


class ModelHost:
    """One model by its names: known from its settings, then `read`, then run by an engine.

    `start` makes an engine; the model may be `known`, read before with its adapters. `cache_bytes`
    is the memory for keys and values where the model's settings say nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        start: Start,
        metrics: Metrics,
        known: ServedModel | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if config.kv_cache_memory_bytes is None and cache_bytes is not None:
            config = replace(config, kv_cache_memory_bytes=cache_bytes)
        self.config = config
        # of the model and its adapters; the server itself uses the first
        self.names = known.names if known else (*names_of(config), *adapters_of(config))
        self.name = self.names[0]
        self.paths = known.paths if known else paths_of(config)
        self.known = known  # as it was read; it stays when the engine is unloaded
        self.metrics = metrics
        self.loading = LoadWatch("" if known else self.name)  # one that was read is alone
        self.tenants = Tenants(self.loading)
        self.engine = EngineLife(self.tenants, self.loading, metrics.engine)
        self._start = start
        self._reading: asyncio.Future[ServedModel] | None = None  # a thread that runs
        self._failure: _Failure | None = None

    @property
    def root(self) -> str:
        """The hub's id, or the folder's name."""
        return root_of(self.config)

    @property
    def is_here(self) -> bool:
        """Whether the size is known, since nothing need be downloaded."""
        return self.known is not None or os.path.exists(self._path)

    @property
    def model(self) -> ServedModel:
        """The model, once it was read."""
        assert self.known is not None
        return self.known

    @property
    def ready(self) -> Ready | None:
        """The limits of the engine that was up last."""
        return self.known.ready if self.known else None

    @property
    def local(self) -> ModelConfig:
        """The model's settings, with the folder that it was read from."""
        return replace(self.config, model=str(self.model.folder), adapter=self.adapters)

    @property
    def may_see_images(self) -> bool:
        """Whether the model sees images, or may: one that was not read is not opened for this."""
        if self.known is not None:
            return self.known.has_vision
        is_text = self.config.lane.endswith("-text")
        return not is_text and may_have_images(self.config.model, self.config.revision)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that are served now, as settings name them."""
        if self.known is None:
            return self.config.adapter
        return tuple(f"{name}={it.path}" for name, it in self.known.adapters.items())

    def add_adapter(self, adapter: Adapter) -> None:
        """Let requests ask for an adapter by its name."""
        self.model.add_adapter(adapter)
        self.names = self.model.names

    def remove_adapter(self, name: str) -> Adapter | None:
        """Serve an adapter no more; None if there is none of that name."""
        if self.known is None:
            return None
        adapter = self.known.remove_adapter(name)
        self.names = self.known.names
        return adapter

    def reads_like(self, other: "ModelHost") -> bool:
        """Whether both make the same prompt of a request, and the same answer of its tokens."""
        if other is self:
            return True
        fields = ("model", "revision", "chat_template", "tool_format", "reasoning_format")
        return all(getattr(self.config, it) == getattr(other.config, it) for it in fields)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, weights and cache; an estimate until it has been loaded."""
        cache = self.config.kv_cache_memory_bytes or 0
        if self.ready is not None:
            return (self.ready.weight_bytes + cache) * self.config.replicas
        path = self.known.folder if self.known is not None else self._path
        if not os.path.isdir(path):
            return (_size_of(path) + cache) * self.config.replicas
        files = list(path.glob("*.safetensors")) or list(path.glob("*.gguf"))
        return (sum(map(_size_of, files)) + cache) * self.config.replicas

    @property
    def _path(self) -> Path:
        """The model's path, if it is no hub id."""
        return find_model(MINI) if self.config.model == MINI else Path(self.config.model)

    async def read(self) -> None:
        """Read all but the weights, which may be a download; ModelError if it cannot be served.

        All callers share one thread. It goes on when they leave, so that the next caller does not
        start another one.
        """
        if self.known is not None:
            return
        if self._reading is None:
            self.loading.begin(READING)
            self._reading = start_thread(self._read)
            self._reading.add_done_callback(self._has_read)
        reading = self._reading
        await asyncio.wait([reading])
        if (error := reading.exception()) is not None:
            # A new exception for each caller: one that is raised again collects their frames.
            raise ModelError(str(error), getattr(error, "code", "load_failed"))

    def _has_read(self, reading: "asyncio.Future[ServedModel]") -> None:
        self._reading = None
        self.loading.end()
        if not reading.cancelled() and reading.exception() is None:
            self.known = reading.result()

    def _read(self) -> ServedModel:
        """Read the model, unless that failed before and its files have not changed since."""
        failed = self._failure
        if failed is not None and failed.holds():
            raise ModelError(failed.message, failed.code)
        try:
            path = fetch_apart(self.config, self.loading.download)
            files = replace(self.config, model=path)
            stamp = file_stamp(files)
            try:
                return read_checked(self.config, path)
            except NotChecked:
                raise
            except ModelError as error:
                ends = time.monotonic() + _REMEMBERED_S
                self._failure = _Failure(files, stamp, error.code, str(error), ends)
                raise
        except ModelError as error:
            for details in getattr(error, "__notes__", ()):
                logger.error("%s could not be read:\n%s", self.name, details)
            raise
        except BaseException as error:  # a library's panic is not an Exception
            logger.exception("%s could not be read", self.name)
            message = f"It could not be read ({type(error).__name__}); download it again."
            raise ModelError(message, "load_failed") from error

    def begin(self) -> None:
        """Starts the engine."""
        self.engine.begin(self.model, self._start(self.local))

    def resize(self, config: ModelConfig, within_s: float) -> bool:
        """Takes another number of engines at once; False if it cannot, or if more has changed.

        Streams of engines that leave have `within_s` to end.
        """
        numbers = {"replicas": config.replicas, "min_replicas": config.min_replicas}
        if config != replace(self.config, **numbers) or not self.engine.resize(config, within_s):
            return False
        self.config = config
        return True


def _size_of(file: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    try:
        return file.stat().st_size
    except (OSError, ValueError):  # the latter for a name that no file can have
        return 0
