"""Loads models that are not ours, and asks what their functions take and their objects hold."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.checkpoints.headers import read_headers
from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError

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
