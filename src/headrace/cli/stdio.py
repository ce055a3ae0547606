"""The standard streams: closed, in another encoding, or a terminal that shows a model's words."""

import io
import os
import re
import sys

from headrace_common.errors import ConfigError

# A model's words must not move the cursor, or worse.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def make_usable() -> None:
    """A closed stream is an empty one; what stdout's encoding has no character for is a `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, for as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def read_stdin() -> str:
    """The whole input; ConfigError if it is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"stdin is not {error.encoding} (byte {error.start}: {error.object[error.start]:#x}); "
            "convert it, for example with iconv, or set PYTHONIOENCODING to what it is."
        ) from None


def tame(text: str) -> str:
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def printed(text: str) -> str:
    """A model's words as they go to stdout: a file gets them as they are."""
    return tame(text) if sys.stdout.isatty() else text
