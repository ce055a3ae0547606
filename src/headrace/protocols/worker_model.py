"""The text side of each model in a worker, and the memory that jobs may take beside it."""

import contextlib
import importlib
import logging
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.protocols.fields.messages import placeholder_in_text
from headrace.protocols.grammars import GrammarMaker
from headrace.text.text_model import TextModel
from headrace.workers.pool import MEMORY_BYTES
from headrace_common.errors import ModelError, RequestError

logger = logging.getLogger(__name__)

_LOAD_BYTES = 4 << 30  # a load may take; a worker for images loads torch too
_MAX_CAUSE = 1000  # characters of a library's error in the log
_KEPT_BYTES = MEMORY_BYTES // 4  # beyond what was loaded, between two jobs

Bound = Callable[[], contextlib.AbstractContextManager[None]]


class WorkerModel:
    """The text side of one model, read when it is first needed, within `bound`."""

    def __init__(
        self,
        names: tuple[str, ...],
        load: Callable[[], TextModel],
        bound: Bound,
        paths: frozenset[str] = frozenset(),
    ) -> None:
        self.names, self.paths = names, paths
        self._load = load
        self._bound = bound

    @cached_property
    def model(self) -> TextModel:
        with self._bound():
            try:
                return self._load()
            except ModelError as error:
                raise self._unread(error) from error
            except MemoryError as error:
                failure = ModelError(f"It takes more than {_LOAD_BYTES >> 30} GiB.", "load_failed")
                raise self._unread(failure) from error

    def _unread(self, error: ModelError) -> RequestError:
        """Clients hear the code alone: the words may have a path."""
        logger.error("%s could not be read. %s", self.names[0], error)
        message = f"The model {self.names[0]!r} could not be read ({error.code})"
        return RequestError("load_failed", f"{message}; the server's log says why.", "model")

    @cached_property
    def image_processor(self) -> Any:
        """Imported by name: it needs torch, which only a worker for images loads."""
        model = self.model
        with self._bound():
            module = importlib.import_module("headrace_engine.runner.images")
            try:
                return module.ImageProcessor(model.folder, model.has_native_vision)
            except ModelError as error:
                logger.error("%s %s", error, str(error.__cause__ or "")[:_MAX_CAUSE])
                raise RequestError("unsupported_content", str(error)) from error

    def check_placeholders(self, token_ids: Sequence[int]) -> None:
        """Such tokens stand for an image, and there is none."""
        placeholders = self.model.spec.placeholder_ids if self.model.has_vision else ()
        if any(token_id in token_ids for token_id in placeholders):
            raise placeholder_in_text("prompt")

    @cached_property
    def grammars(self) -> GrammarMaker:
        model = self.model
        with self._bound():
            return GrammarMaker(model)


def in_worker(model: TextModel | WorkerModel) -> WorkerModel:
    if isinstance(model, WorkerModel):
        return model
    return WorkerModel(model.names, lambda: model, contextlib.nullcontext, model.paths)


class MemoryBound:
    """The memory that jobs may hold beyond the models that were loaded."""

    def __init__(self, num_bytes: int = MEMORY_BYTES) -> None:
        self._allowed = num_bytes
        self._loaded = _held_bytes()

    @property
    def is_near(self) -> bool:
        """Between two jobs, more is held than should be."""
        return _held_bytes() > self._loaded + _KEPT_BYTES

    def set(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # then time alone is bounded
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._loaded + self._allowed, hard))

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Raise the bound for the time of a load; memory that the load takes counts as kept."""
        before = _held_bytes()
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (before + _LOAD_BYTES, hard))
        try:
            yield
        finally:
            self._loaded += max(0, _held_bytes() - before)
            self.set()


def _held_bytes() -> int:
    """Memory for data, as RLIMIT_DATA counts it; 0 where the system does not tell."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")
