"""Holds the tokenizers and templates of the models in a worker, and bounds the memory of jobs."""

import contextlib
import logging
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.protocols.fields.messages import placeholder_in_text
from headrace.protocols.grammars import GrammarMaker
from headrace.text.breakers import BreakerFinder
from headrace.text.model_names import Aliases, Models
from headrace.text.text_model import TextModel
from headrace.workers.pool import MEMORY_BYTES
from headrace_common.errors import ModelError, RequestError

if TYPE_CHECKING:
    from headrace_engine.runner.images import ImageProcessor

logger = logging.getLogger(__name__)

# A load may take this much memory; a worker for images also loads torch.
_LOAD_BYTES = 4 << 30
# The log shows at most this many characters of a library's error.
_MAX_CAUSE = 1000
# Between two jobs, a worker may keep this much memory beyond the loaded models.
_KEPT_BYTES = MEMORY_BYTES // 4

Bound = Callable[[], contextlib.AbstractContextManager[None]]


class WorkerModel:
    """The tokenizer, template and grammar compiler of one model, each loaded on first use.

    During a load, `bound` sets a different memory limit.
    """

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
                failure = ModelError(
                    f"Loading it takes more than {_LOAD_BYTES >> 30} GiB of memory.", "load_failed"
                )
                raise self._unread(failure) from error

    def _unread(self, error: ModelError) -> RequestError:
        """Log the error. Return its code without its message, which may contain a path."""
        logger.error("%s could not be read. %s", self.names[0], error)
        message = f"The model {self.names[0]!r} could not be read ({error.code})"
        return RequestError("load_failed", f"{message}; the server's log says why.", "model")

    @cached_property
    def image_processor(self) -> "ImageProcessor":
        """The engine's image processor. It needs PyTorch, so only workers for images load it."""
        model = self.model
        with self._bound():
            from headrace_engine.runner.images import ImageProcessor

            try:
                return ImageProcessor(model.folder, model.has_native_vision)
            except ModelError as error:
                logger.error("%s %s", error, str(error.__cause__ or "")[:_MAX_CAUSE])
                raise RequestError("unsupported_content", str(error)) from error

    def check_placeholders(self, token_ids: Sequence[int]) -> None:
        """Raise RequestError if a text prompt contains a token that stands for an image."""
        placeholders = self.model.spec.placeholder_ids if self.model.has_vision else ()
        if any(token_id in token_ids for token_id in placeholders):
            raise placeholder_in_text("prompt")

    @cached_property
    def grammars(self) -> GrammarMaker:
        model = self.model
        with self._bound():
            return GrammarMaker(model)

    @cached_property
    def breakers(self) -> BreakerFinder:
        model = self.model
        with self._bound():
            return BreakerFinder(model.tokenizer)


class WorkerModels(Models[WorkerModel]):
    """The models that a worker serves. `rendering` bounds the time of a chat template."""

    def __init__(
        self,
        models: Iterable[TextModel | WorkerModel],
        rendering: Bound,
        aliases: Aliases | None = None,
    ) -> None:
        super().__init__(tuple(map(_in_worker, models)), aliases)
        self.rendering = rendering

    def asked(self, fields: Mapping[str, Any]) -> WorkerModel | None:
        """Return the model that the fields of a body name; None if no model has that name.

        A request for an unknown model is refused later, unless the request attaches to an earlier
        stream.
        """
        name = fields.get("model")
        return self.first if name is None else self.answering(name)

    @contextlib.contextmanager
    def noting(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Add the body's model to each RequestError raised in the `with` block, for the log."""
        try:
            yield
        except RequestError as error:
            name = given.get("model")
            text = self.answering(name) if isinstance(name, str) else self.first
            if text is not None:
                error.noting(model=text.names[0])
            raise


def _in_worker(model: TextModel | WorkerModel) -> WorkerModel:
    if isinstance(model, WorkerModel):
        return model
    return WorkerModel(model.names, lambda: model, contextlib.nullcontext, model.paths)


class MemoryBound:
    """Limits the memory that jobs may allocate beyond the loaded models."""

    def __init__(self, num_bytes: int = MEMORY_BYTES) -> None:
        self._allowed = num_bytes
        self._loaded = _held_bytes()

    @property
    def is_near(self) -> bool:
        """Whether a worker keeps more memory between two jobs than `_KEPT_BYTES` allows."""
        return _held_bytes() > self._loaded + _KEPT_BYTES

    def set(self) -> None:
        # If the system refuses the limit, only time bounds the jobs.
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._loaded + self._allowed, hard))

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Raise the limit during a load; the memory that the load takes counts as loaded."""
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
    """Return the data memory in bytes, as RLIMIT_DATA counts it; 0 if the figure is unknown."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")
