"""Asks code that is not ours what a function takes and how many bytes an object holds."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
