"""Chooses where the command stores streams and chats."""

import os
from pathlib import Path


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
