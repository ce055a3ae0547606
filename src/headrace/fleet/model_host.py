"""One model a server runs: its settings, what was read of it, its engine and its tenants."""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from headrace.checkpoints.find import MINI, find_model, may_have_images
from headrace.checkpoints.headers import count_parameters
from headrace.checkpoints.hub import OnProgress
from headrace.checkpoints.spec import read_spec
from headrace.config.settings import ModelConfig
from headrace.core.errors import ModelError
from headrace.core.loading import READING
from headrace.core.messages import Ready
from headrace.engine.client import EngineClient
from headrace.fleet.engine_life import EngineLife
from headrace.fleet.fetch_apart import fetch_apart
from headrace.fleet.in_thread import in_thread
from headrace.fleet.load_watch import LoadWatch
from headrace.fleet.model_check import Checked, CheckFailed, check_model
from headrace.fleet.model_names import adapters_of, names_of, paths_of, root_of
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import Tenants
from headrace.metrics.metrics import Metrics

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30
"""Memory of each model for keys and values, where it is budgeted and settings say nothing."""

Start = Callable[[ModelConfig], EngineClient]


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
        self.paths = known.paths if known else paths_of(config)
        self.known = known  # as it was read; it stays when the engine is unloaded
        self.metrics = metrics
        self.loading = LoadWatch("" if known else self.name)  # one that was read is alone
        self.tenants = Tenants(self.loading)
        self.engine = EngineLife(self.tenants, self.loading, metrics.engine)
        self._start = start
        self._reading = asyncio.Lock()
        self._failure: tuple[object, CheckFailed] | None = None  # and the files that it was about

    @property
    def names(self) -> tuple[str, ...]:
        """The model's, and those of its adapters."""
        if self.known is not None:
            return self.known.names
        return (*names_of(self.config), *adapters_of(self.config))

    @property
    def name(self) -> str:
        """The name by which the server itself knows the model."""
        return self.names[0]

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

    def reads_like(self, other: "ModelHost") -> bool:
        """Whether both make the same prompt of a request, and the same answer of its tokens."""
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
        """Reads all but the weights, which may be a download; ModelError if it cannot be served."""
        async with self._reading:
            if self.known is None:
                with self.loading.during(READING):
                    on_progress = self.loading.download
                    self.known = await in_thread(lambda: self._read(on_progress))

    def _read(self, on_progress: OnProgress) -> ServedModel:
        """Read the model, unless reading failed before and its files have not changed since."""
        config = self.config
        stamp = _stamp(self._path)
        if self._failure is not None and stamp is not None and self._failure[0] == stamp:
            raise self._failure[1]
        try:
            checked = self._check(on_progress)
            model = ServedModel(
                config, folder=checked.folder, num_parameters=checked.num_parameters
            )
            model.read_adapters(config)
        except CheckFailed as error:
            self._failure = (stamp, error)
            raise
        except ModelError as error:
            for details in getattr(error, "__notes__", ()):
                logger.error("%s could not be read:\n%s", self.name, details)
            raise
        except Exception as error:  # one model, and not the server
            logger.exception("%s could not be read", self.name)
            message = f"It could not be read ({type(error).__name__}); download it again."
            raise ModelError(message, "load_failed") from error
        return model

    def _check(self, on_progress: OnProgress) -> Checked:
        """Have a process that can be killed read the model first, unless it is our own."""
        config = self.config
        if config.model == MINI:
            return Checked(self._path, count_parameters(read_spec(self._path)))
        path = fetch_apart(config, on_progress)
        return check_model(replace(config, model=path))

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


def _stamp(path: Path) -> object:
    """Return a value that changes with a folder's first thousand files; None without a folder."""
    try:
        with contextlib.ExitStack() as closing:
            if path.is_dir():
                entries = [*itertools.islice(closing.enter_context(os.scandir(path)), 1000)]
                status = [it.stat(follow_symlinks=False) for it in entries]
            else:
                status = [path.stat()]
    except OSError:
        return None
    return sorted((it.st_ino, it.st_mtime_ns, it.st_size) for it in status)


def _size_of(file: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    try:
        return file.stat().st_size
    except (OSError, ValueError):  # the latter for a name that no file can have
        return 0
