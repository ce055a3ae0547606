"""Headrace: an LLM inference server whose streams are never silent, never stalled, never lost."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.answer import Answer, Choice, Piece, Ranked
    from headrace.client.async_client import AsyncClient, AsyncStream
    from headrace.client.client import Client, Stream
    from headrace.client.errors import Refused, Unreachable
    from headrace.core.errors import ModelError
    from headrace.core.loading import LoadProgress
    from headrace.errors import ConfigError, HeadraceError, RequestFailed, StreamFailed
    from headrace.llm import LLM

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "ConfigError",
    "HeadraceError",
    "LoadProgress",
    "ModelError",
    "Piece",
    "Ranked",
    "Refused",
    "RequestFailed",
    "Stream",
    "StreamFailed",
    "Unreachable",
]

_PLACES = {
    "headrace.answer": ("Answer", "Choice", "Piece", "Ranked"),
    "headrace.client.async_client": ("AsyncClient", "AsyncStream"),
    "headrace.client.client": ("Client", "Stream"),
    "headrace.client.errors": ("Refused", "Unreachable"),
    "headrace.core.errors": ("ModelError",),
    "headrace.core.loading": ("LoadProgress",),
    "headrace.errors": ("ConfigError", "HeadraceError", "RequestFailed", "StreamFailed"),
    "headrace.llm": ("LLM",),
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: a client needs no tensors."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(place), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
