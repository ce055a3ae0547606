"""Loads models that are not ours, and asks what their functions take and their objects hold."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.checkpoints.headers import read_headers
from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError
from headrace.core.layout import MemoryLayout

FOREIGN_ERRORS = (AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""What code that is not ours raises where it is not made for what we give it."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the largest logit: what rounding alone may change."""

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


class SlotRoom(NamedTuple):
    """What a layout is asked for: bytes at most, sequences and their positions at most."""

    free_bytes: int
    max_num_seqs: int
    max_positions: int
    block_size: int

    def slots(self, per_position: int) -> MemoryLayout:
        """Slots that each hold a sequence of the greatest length, as many as fit."""
        each = per_position * self.max_positions
        num_slots = max(1, min(self.max_num_seqs, self.free_bytes // each))
        longest = min(self.max_positions, self.free_bytes // num_slots // per_position)
        return MemoryLayout(block_size=self.block_size, num_slots=num_slots, max_positions=longest)


def load_pretrained(auto: Any, spec: ModelSpec, dtype: torch.dtype) -> Any:
    """The model by one of transformers' Auto classes; ModelError names a tensor that is wrong."""
    read_headers(spec)  # a damaged file is named before transformers meets it
    model, report = auto.from_pretrained(
        spec.folder,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are in the report
        output_loading_info=True,
    )
    for kind, fault in _FAULTS.items():
        for key in report[kind]:
            tensor = key if isinstance(key, str) else key[0]  # mismatched ones with their shapes
            raise ModelError(
                f"Tensor {tensor} of {spec.name} {fault}; check config.json against the weights.",
                "model_corrupt",
            )
    return model
