"""Headrace: an LLM inference server whose streams are never silent, never stalled, never lost."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncClient", "Client"]

_PLACES = {
    "LLM": "headrace.llm",
    "Client": "headrace.client.client",
    "AsyncClient": "headrace.client.async_client",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: a client needs no tensors."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
