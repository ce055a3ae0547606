"""Holds one model of a server: settings, data from the model's files, engine and users."""

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
from headrace.fleet.engine_users import EngineUsers
from headrace.fleet.fetch_process import fetch_apart
from headrace.fleet.file_stamp import Stamp, file_stamp
from headrace.fleet.in_thread import start_thread
from headrace.fleet.load_progress import LoadProgressWatch
from headrace.fleet.model_check import NotChecked, read_checked
from headrace.fleet.served_model import ServedModel
from headrace.metrics.metrics import Metrics
from headrace.text.model_names import adapters_of, names_of, paths_of, root_of
from headrace_common.adapter import Adapter
from headrace_common.checkpoints.find import MINI, find_model, may_have_images
from headrace_common.checkpoints.hub import OnProgress
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_common.loading import READING
from headrace_common.messages import Ready

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30
"""Default size of a model's KV cache in bytes, if several models share the memory."""

Start = Callable[[ModelConfig], EngineClient]

# Seconds until a failed read is repeated although the files have not changed. The cause may be
# temporary, such as a full disk.
_REMEMBERED_S = 600.0


class ModelFiles(NamedTuple):
    """How a host gets a model: `fetch` returns its local path, `read` reads it from this path.

    Both run in a thread, and raise ModelError.
    """

    fetch: Callable[[ModelConfig, OnProgress], str] = fetch_apart
    read: Callable[[ModelConfig, str], ServedModel] = read_checked


FILES = ModelFiles()


class _Failure(NamedTuple):
    """The reason why a model could not be read, and the state of the files during that read."""

    files: ModelConfig
    stamp: Stamp | None
    code: str
    message: str
    ends: float  # monotonic seconds

    def holds(self) -> bool:
        """Return whether the failure is recent and the files have not changed."""
        return time.monotonic() < self.ends and file_stamp(self.files) == self.stamp


class ModelHost:
    """One model of the server. Before `read`, only the model's settings are available.

    `start` starts an engine. `known` is the model with its adapters, if the model was read
    before. `cache_bytes` is the size of the KV cache if the model's settings give no size.
    """

    def __init__(
        self,
        config: ModelConfig,
        start: Start,
        metrics: Metrics,
        known: ServedModel | None = None,
        cache_bytes: int | None = None,
        files: ModelFiles = FILES,
    ) -> None:
        if config.kv_cache_memory_bytes is None and cache_bytes is not None:
            config = replace(config, kv_cache_memory_bytes=cache_bytes)
        self.config = config
        # Names of the model and of its adapters. The server itself uses the first name.
        self.names = known.names if known else (*names_of(config), *adapters_of(config))
        self.name = self.names[0]
        self.paths = known.paths if known else paths_of(config)
        # None until the model has been read. Unloading the engine does not change this value.
        self.known = known
        self.metrics = metrics
        # A model that was read before the server started is the only model, so reports need no
        # name.
        self.loading = LoadProgressWatch("" if known else self.name)
        self.users = EngineUsers(self.loading)
        self.engine = EngineLife(self.users, self.loading, metrics.engine)
        self._start, self._files = start, files
        # Set while a thread reads the model. The future gets the result of the thread.
        self._reading: asyncio.Future[ServedModel] | None = None
        self._failure: _Failure | None = None

    @property
    def root(self) -> str:
        """The model's hub id, or the name of its folder or file."""
        return root_of(self.config)

    @property
    def is_here(self) -> bool:
        """Whether the model's files are on this machine, so that the model's size is known."""
        return self.known is not None or os.path.exists(self._path)

    @property
    def model(self) -> ServedModel:
        """The model. The host must have read the model before."""
        assert self.known is not None
        return self.known

    @property
    def ready(self) -> Ready | None:
        """The latest limits of the engine; None before the engine's first start."""
        return self.known.ready if self.known else None

    @property
    def local(self) -> ModelConfig:
        """The model's settings, with the model's local folder and the current adapters."""
        return replace(self.config, model=str(self.model.folder), adapter=self.adapters)

    @property
    def may_see_images(self) -> bool:
        """Whether the model accepts images. The value is a guess until the model has been read."""
        if self.known is not None:
            return self.known.has_vision
        config = self.config
        is_text = config.lane.endswith("-text") or config.lane == "llama-cpp"
        return not is_text and may_have_images(config.model, config.revision, config.mmproj)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that are served now, in the format of the settings: NAME=PATH."""
        if self.known is None:
            return self.config.adapter
        return tuple(f"{name}={it.path}" for name, it in self.known.adapters.items())

    def add_adapter(self, adapter: Adapter) -> None:
        """Serve an adapter, so that requests can name the adapter."""
        self.model.add_adapter(adapter)
        self.names = self.model.names

    def remove_adapter(self, name: str) -> Adapter | None:
        """Stop serving an adapter; return None if no adapter has this name."""
        if self.known is None:
            return None
        adapter = self.known.remove_adapter(name)
        self.names = self.known.names
        return adapter

    def reads_like(self, other: "ModelHost") -> bool:
        """Return whether both hosts render the same prompts and parse answers in the same way."""
        if other is self:
            return True
        fields = ("model", "revision", "mmproj", "chat_template", "tool_format", "reasoning_format")
        return all(getattr(self.config, it) == getattr(other.config, it) for it in fields)

    @property
    def num_bytes(self) -> int:
        """Memory for the weights and caches of all replicas, in bytes.

        The value is an estimate until the model has been loaded.
        """
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
        """The path that the settings give for the model. For a hub id, the path has no meaning."""
        return find_model(MINI) if self.config.model == MINI else Path(self.config.model)

    async def read(self) -> None:
        """Download the model, and read the model except its weights.

        Raises ModelError on failure. All callers wait for the same thread. The thread continues
        when the callers leave, so that a later caller does not start a second thread.
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
            # Each caller gets a new exception, since an exception that is raised several times
            # collects tracebacks.
            raise ModelError(str(error), getattr(error, "code", "load_failed"))

    def _has_read(self, reading: "asyncio.Future[ServedModel]") -> None:
        self._reading = None
        self.loading.end()
        if not reading.cancelled() and reading.exception() is None:
            self.known = reading.result()

    def _read(self) -> ServedModel:
        """Read the model.

        If an earlier read failed and is still remembered, raise the same error again.
        """
        failed = self._failure
        if failed is not None and failed.holds():
            raise ModelError(failed.message, failed.code)
        try:
            path = self._files.fetch(self.config, self.loading.download)
            files = replace(self.config, model=path)
            stamp = file_stamp(files)
            try:
                return self._files.read(self.config, path)
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
        # A panic in a Rust library is a BaseException.
        except BaseException as error:
            logger.exception("%s could not be read", self.name)
            message = f"The model could not be read ({type(error).__name__}); download it again."
            raise ModelError(message, "load_failed") from error

    def begin(self) -> None:
        """Start the engine."""
        self.engine.begin(self.model, self._start(self.local))

    def resize(self, config: ModelConfig, within_s: float) -> bool:
        """Change the number of replicas; return False if the new settings need a reload.

        Streams of removed replicas get `within_s` seconds to end.
        """
        numbers = {"replicas": config.replicas, "min_replicas": config.min_replicas}
        if config != replace(self.config, **numbers) or not self.engine.resize(config, within_s):
            return False
        self.config = config
        return True


def _size_of(file: Path) -> int:
    """Return the size of a file in bytes; 0 if the file does not exist."""
    try:
        return file.stat().st_size
    # ValueError means that the path is not valid for a file.
    except (OSError, ValueError):
        return 0
