"""Loads models that are not ours, and asks what their functions take and their objects hold."""

import contextlib
import inspect
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace_common.checkpoints.headers import read_headers
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Chunk, PromptInputs

FOREIGN_ERRORS = (AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors that foreign code raises when it is not made for what we give it."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The share of the largest logit that rounding alone may change."""

_FAULTS = {
    "missing_keys": "is missing",
    "unexpected_keys": "is unknown to the model",
    "mismatched_keys": "has another shape than the model's",
}


@dataclass(frozen=True, slots=True)
class Signature:
    """Read once per function."""

    names: frozenset[str]
    takes_any: bool  # takes any keyword, or cannot be inspected

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
    """Bytes of all tensors within an object, each counted once."""
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


class _Reached(Exception):
    """The layer was called; what with is noted."""


def until_called(layer: nn.Module, run: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and keywords with which `run` first calls the layer; it goes no further."""
    called: list[Any] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        called.extend((list(arguments), keywords))
        raise _Reached

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    except _Reached:
        pass
    finally:
        hook.remove()
    return called[0], called[1]


class Weights(NamedTuple):
    """How many parameters a model has, and their bytes."""

    num: int
    num_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> "Weights":
        parameters = list(model.parameters())
        return cls(sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters))


class SlotLane(ABC):
    """Base of the lanes whose sequences have a dense cache in a slot, each run by itself."""

    storage = None  # a cache as the model makes it has no form that could be kept

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        """Slots that each hold a sequence of the greatest length, as many as fit."""
        per_position = self._measure()
        num_slots = max(1, min(max_num_seqs, free_bytes // (per_position * max_positions)))
        longest = min(max_positions, free_bytes // num_slots // per_position)
        return MemoryLayout(block_size=block_size, num_slots=num_slots, max_positions=longest)

    def begin(self, sequence_id: SequenceId, inputs: PromptInputs) -> None:  # noqa: B027
        """Does nothing: the works of a sequence bring all that it shows."""

    def end(self, sequence_id: SequenceId) -> None:  # noqa: B027
        """Does nothing: the sequence's slot goes to another."""

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        return torch.cat([self._run(*each) for each in zip(chunks, token_ids, strict=True)])

    def logits(self, rows: Tensor) -> Tensor:
        return rows.float()

    @abstractmethod
    def _run(self, chunk: Chunk, token_ids: "array[int]") -> Tensor:
        """Logits [num_rows, vocab] of the chunk's last tokens; the slot's cache grows by all."""

    @abstractmethod
    def _measure(self) -> int:
        """Bytes per position of a cache."""


def load_pretrained(
    auto: Any, spec: ModelSpec, dtype: torch.dtype, unused: str | None = None
) -> Any:
    """The model by one of transformers' Auto classes; ModelError names a tensor that is wrong.

    Where only a part of the model runs, files may have more than it, and lack what begins `unused`.
    """
    read_headers(spec)  # a damaged file is named before transformers meets it
    with _without_bars():
        try:
            model, report = auto.from_pretrained(
                spec.folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
            )
        except (MemoryError, ModelError):
            raise
        except Exception as error:  # transformers checks few of config.json's values
            raise ModelError(
                f"transformers cannot build {spec.name} by its config.json "
                f"({type(error).__name__}); check the file, or download the model again.",
                "model_corrupt",
            ) from error
    spared = {} if unused is None else {"unexpected_keys": "", "missing_keys": unused}
    for kind, fault in _FAULTS.items():
        for key in report[kind]:
            tensor = key if isinstance(key, str) else key[0]  # mismatched ones with their shapes
            if kind in spared and tensor.startswith(spared[kind]):
                continue
            raise ModelError(
                f"Tensor {tensor} of {spec.name} {fault}; check config.json against the weights.",
                "model_corrupt",
            )
    return model


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """A bar that transformers draws would be a line of the server's log, with its control codes."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
