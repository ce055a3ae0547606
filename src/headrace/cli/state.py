"""Where the command keeps what outlives it: streams, and the last chat."""

import os
from pathlib import Path


def state_home() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "headrace"


def is_redis(state_dir: str) -> bool:
    """Whether --state-dir names a Redis server rather than a folder."""
    return state_dir.startswith(("redis://", "rediss://", "unix://"))


def streams_folder(state_dir: str | None, port: int) -> Path | None:
    """Where a server keeps its streams, as --state-dir says; None: in memory."""
    if state_dir is None:
        return state_home() / str(port)
    return None if state_dir == "none" else Path(state_dir)
