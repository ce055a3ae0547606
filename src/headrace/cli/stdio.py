"""Handles standard streams that are closed or terminals, and prints tables to stdout."""

import io
import os
import re
import sys
from collections.abc import Sequence

from headrace_common.errors import ConfigError

# Control characters in a model's text must not reach the terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def make_usable() -> None:
    """Replace closed streams by empty streams. Make stdout print `?` for unknown characters."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, for as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def read_stdin() -> str:
    """Read all of stdin. Raises ConfigError if stdin is not text in the expected encoding."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"stdin is not {error.encoding} (byte {error.start}: {error.object[error.start]:#x}); "
            "convert it, for example with iconv, or set PYTHONIOENCODING to its encoding."
        ) from None


def tame(text: str) -> str:
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def printed(text: str) -> str:
    """Return a model's text for stdout. On a terminal, replace its control characters."""
    return tame(text) if sys.stdout.isatty() else text


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of cells in columns."""
    widths = column_widths(rows)
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def column_widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
