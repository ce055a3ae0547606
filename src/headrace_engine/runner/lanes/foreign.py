"""Helps lanes to load, call, measure and probe models of the transformers library."""

import contextlib
import inspect
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from headrace_common.checkpoints.headers import read_headers
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Chunk, PromptInputs
from headrace_engine.weights.weights import unpacked_weights

FOREIGN_ERRORS = (AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors that a transformers model raises if it does not support Headrace's calls."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The maximum error that rounding alone can cause, as a fraction of the largest logit."""

_FAULTS = {
    "missing_keys": "is missing",
    "unexpected_keys": "is unknown to the model",
    "mismatched_keys": "has a different shape in the model",
}


@dataclass(frozen=True, slots=True)
class Signature:
    """The keyword arguments that a function accepts."""

    names: frozenset[str]
    # True if the function accepts any keyword or cannot be inspected.
    takes_any: bool

    @classmethod
    def of(cls, function: Any) -> "Signature":
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return cls(frozenset(), True)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return cls(frozenset(parameter.name for parameter in parameters), takes_any)

    def accepted(self, offered: dict[str, Any]) -> dict[str, Any]:
        return {k: value for k, value in offered.items() if self.takes_any or k in self.names}


def tensor_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Return the bytes of all tensors within an object, counting each tensor once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(part, seen) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(part, seen) for part in value)
    return tensor_bytes(vars(value), seen) if hasattr(value, "__dict__") else 0


class _LayerCalled(Exception):
    """Raised to leave a model's forward once the layer has been called."""


def capture_first_call(
    layer: nn.Module, run: Callable[[], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Stop `run` at the first call of the layer; return the call's arguments and keywords."""
    called: list[Any] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        called.extend((list(arguments), keywords))
        raise _LayerCalled

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    except _LayerCalled:
        pass
    finally:
        hook.remove()
    return called[0], called[1]


class Weights(NamedTuple):
    """The number of a model's parameters, and the bytes of all parameters."""

    num: int
    num_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> "Weights":
        parameters = list(model.parameters())
        return cls(sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters))


class SlotLane(ABC):
    """Base class of lanes that run each sequence separately, with a dense cache in a slot."""

    # The model chooses the layout of its caches, so the caches cannot be saved as blocks.
    storage = None

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        """Return as many slots as fit, each large enough for a sequence of the maximum length."""
        per_position = self._measure()
        num_slots = max(1, min(max_num_seqs, free_bytes // (per_position * max_positions)))
        longest = min(max_positions, free_bytes // num_slots // per_position)
        return MemoryLayout(
            block_size=block_size,
            num_slots=num_slots,
            max_positions=longest,
            forward_per_chunk=True,
        )

    def begin(self, sequence_id: SequenceId, inputs: PromptInputs) -> None:  # noqa: B027
        """Do nothing, because each call of `encode` receives all inputs."""

    def end(self, sequence_id: SequenceId) -> None:  # noqa: B027
        """Do nothing, because the next sequence overwrites the slot."""

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        return torch.cat([self._run(*each) for each in zip(chunks, token_ids, strict=True)])

    def logits(self, rows: Tensor) -> Tensor:
        return rows.float()

    @abstractmethod
    def _run(self, chunk: Chunk, token_ids: "array[int]") -> Tensor:
        """Append a chunk to the cache in the chunk's slot.

        Returns the logits [num_rows, vocab] of the chunk's last tokens.
        """

    @abstractmethod
    def _measure(self) -> int:
        """Return how many bytes a cache takes per position."""


def load_pretrained(
    auto: Any, spec: ModelSpec, dtype: torch.dtype, unused: str | None = None
) -> Any:
    """Load a model with an Auto class of transformers.

    If `unused` is set, only a part of the model runs. In this case, files may contain tensors
    that the part lacks, and tensors whose names start with `unused` may be missing. Any other
    tensor that is missing, unknown or of the wrong shape raises ModelError.
    """
    # This call reports a damaged file by name before transformers reads the file.
    read_headers(spec)
    with _without_bars():
        try:
            own = _from_gguf(auto, spec, dtype) if spec.is_gguf else _Source(auto, spec.folder)
            model, report = own.model_class.from_pretrained(
                own.folder,
                **own.given,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                # Do not raise for mismatched tensors, which the report lists.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (MemoryError, ModelError):
            raise
        # transformers checks few values of config.json, so a bad value can raise any kind of
        # exception.
        except Exception as error:
            raise ModelError(
                f"transformers cannot build {spec.name} from its config.json "
                f"({type(error).__name__}); check the file, or download the model again.",
                "model_corrupt",
            ) from error
    spared = {} if unused is None else {"unexpected_keys": "", "missing_keys": unused}
    for kind, fault in _FAULTS.items():
        for key in report[kind]:
            # The report lists mismatched tensors together with their shapes.
            tensor = key if isinstance(key, str) else key[0]
            if kind in spared and tensor.startswith(spared[kind]):
                continue
            raise ModelError(
                f"Tensor {tensor} of {spec.name} {fault}; check config.json against the weights.",
                "model_corrupt",
            )
    return model


class _Source(NamedTuple):
    """The class of a model, its folder, and further arguments for `from_pretrained`."""

    model_class: Any
    # None if the arguments contain the weights.
    folder: Path | None
    given: Mapping[str, Any] = MappingProxyType({})


def _from_gguf(auto: Any, spec: ModelSpec, dtype: torch.dtype) -> _Source:
    """Unpack the weights of a GGUF model. An Auto class would need a folder with safetensors."""
    config = AutoConfig.from_pretrained(spec.folder, trust_remote_code=False)
    given = {"config": config, "state_dict": unpacked_weights(spec, dtype)}
    return _Source(auto._model_mapping[type(config)], None, given)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which would put control codes into the server's log."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
