"""Detects an installation without the engine, and explains what is missing."""

from importlib.util import find_spec

WITHOUT_ENGINE = (
    "This installation has no engine: it is headrace-gateway, for gateways of a cluster and for "
    "clients. Install headrace in its place to run models on this machine."
)


def has_engine() -> bool:
    """Return whether the packages that run models are installed."""
    return find_spec("headrace_engine") is not None


def is_missing_engine(error: ModuleNotFoundError) -> bool:
    """Return whether a module cannot be imported because the engine is not installed."""
    package = (error.name or "").partition(".")[0]
    return package in ("headrace_engine", "headrace_kernels", "torch") and not has_engine()
