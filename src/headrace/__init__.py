"""Headrace: an LLM inference server whose streams are never silent, never stalled, never lost."""

import importlib
from typing import TYPE_CHECKING, Any

from headrace_common.version import __version__ as __version__
from headrace_common.without_engine import WITHOUT_ENGINE, is_missing_engine

if TYPE_CHECKING:
    from headrace.client.async_client import AsyncClient, AsyncStream
    from headrace.client.client import Client, Stream
    from headrace.client.errors import Refused, Unreachable
    from headrace.llm.async_llm import AsyncLLM
    from headrace.llm.llm import LLM
    from headrace_common.answer import Answer, Choice, Piece, Ranked
    from headrace_common.errors import (
        ConfigError,
        HeadraceError,
        ModelError,
        RequestFailed,
        StreamFailed,
    )
    from headrace_common.ingestion import Ingestion, Plan
    from headrace_common.loading import LoadProgress
    from headrace_common.sampling_options import SamplingOptions

__all__ = [
    "LLM",
    "Answer",
    "AsyncClient",
    "AsyncLLM",
    "AsyncStream",
    "Choice",
    "Client",
    "ConfigError",
    "HeadraceError",
    "Ingestion",
    "LoadProgress",
    "ModelError",
    "Piece",
    "Plan",
    "Ranked",
    "Refused",
    "RequestFailed",
    "SamplingOptions",
    "Stream",
    "StreamFailed",
    "Unreachable",
]

_PLACES = {
    "headrace_common.answer": ("Answer", "Choice", "Piece", "Ranked"),
    "headrace.client.async_client": ("AsyncClient", "AsyncStream"),
    "headrace.client.client": ("Client", "Stream"),
    "headrace.client.errors": ("Refused", "Unreachable"),
    "headrace_common.loading": ("LoadProgress",),
    "headrace_common.sampling_options": ("SamplingOptions",),
    "headrace_common.errors": (
        "ConfigError",
        "HeadraceError",
        "ModelError",
        "RequestFailed",
        "StreamFailed",
    ),
    "headrace.llm.async_llm": ("AsyncLLM",),
    "headrace.llm.llm": ("LLM",),
    "headrace_common.ingestion": ("Ingestion", "Plan"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that a client does not need PyTorch."""
    for place, names in _PLACES.items():
        if name in names:
            try:
                return getattr(importlib.import_module(place), name)
            except ModuleNotFoundError as error:
                if is_missing_engine(error):
                    raise ImportError(WITHOUT_ENGINE) from None
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, for `dir` and for completion."""
    return [*__all__, "__version__"]
