"""Chooses where the command stores streams and chats."""

import os
from pathlib import Path

import msgspec

from headrace_common.config.settings import ModelConfig, ServerConfig


def state_home() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "headrace"


def is_redis(state_dir: str) -> bool:
    """Return whether --state-dir names a Redis server and not a folder."""
    return state_dir.startswith(("redis://", "rediss://", "unix://"))


def streams_folder(state_dir: str | None, port: int) -> Path | None:
    """Return the folder for streams according to --state-dir; None if streams stay in memory."""
    if state_dir is None:
        return state_home() / str(port)
    return None if state_dir == "none" else Path(state_dir)


def with_prefix_cache(model: ModelConfig, config: ServerConfig) -> ModelConfig:
    """Return the settings for the model's engine, with the default folder of cached prefixes.

    A server that stores no streams stores no prefixes by default. In a cluster, engines run on
    other machines, whose disks the server should not fill.
    """
    if (
        model.prefix_cache.prefix_cache_dir
        or config.streams.state_dir == "none"
        or config.cluster is not None
    ):
        return model
    replace = msgspec.structs.replace
    return replace(model, prefix_cache=replace(model.prefix_cache, prefix_cache_dir="auto"))
