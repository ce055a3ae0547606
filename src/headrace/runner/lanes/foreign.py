"""Questions to code that is not ours: what a function takes, how much an object holds."""

import inspect
from typing import Any

from torch import Tensor


def accepted_arguments(function: Any) -> frozenset[str] | None:
    """Names that it takes; None if it takes any, or does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


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
