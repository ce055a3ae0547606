"""Writes the message that `headrace serve` shows when it accepts requests."""

import os
import re

from headrace.cli.logs import printable
from headrace_common.messages import Ready

_ANY_ADDRESS = re.compile(r"//(0\.0\.0\.0|\[::\])(?=:)")
_MAX_NAMES = 3


def ready_lines(url: str, models: str, is_local: bool) -> tuple[str, str, str]:
    """Return the lines of the message: the server's URL, the chat page, and how to stop.

    Programs wait for the first line, so it starts with the same words for every server. With
    `is_local`, the server only accepts connections from its own machine.
    """
    page, is_any = _ANY_ADDRESS.subn("//127.0.0.1", url)
    where = ""
    if is_local:
        where = " (only from this machine; --host changes that)"
    elif is_any:
        where = " (elsewhere: use this machine's address)"
    return (
        f"Headrace is ready at {url}: {models}",
        f"Chat page: {page}/{where}",
        f"To stop the server, press Ctrl-C or run: kill {os.getpid()}",
    )


def models_on_demand(names: list[str]) -> str:
    """Name the first models of a server that loads models on demand."""
    shown = ", ".join(printable(name) for name in names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown}{f' and {more} more' * (more > 0)}, loaded on demand"


def details(ready: Ready) -> str:
    """Describe how a loaded model runs, for the log."""
    target = "off" if ready.max_stall_s is None else f"{1000 * ready.max_stall_s:g} ms"
    if ready.max_stall_s is not None and ready.highest_stall_s != ready.max_stall_s:
        highest = 1000 * (ready.highest_stall_s or 0)
        target += f" (up to {highest:g} ms if shorter steps would process prompts too slowly)"
    seqs = f"at most {ready.max_num_seqs} stream{'s' * (ready.max_num_seqs > 1)}"
    tokens = ready.layout.num_positions
    seqs += f", {tokens} tokens fit" * (tokens > 0)
    return (
        f"lane {ready.lane}, {ready.device} {ready.dtype}, "
        f"kernels {ready.kernels} ({ready.kernels_reason}), "
        f"context {ready.max_model_len}, {seqs}, stall target {target}"
    )
