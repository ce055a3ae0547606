"""The standard streams: a model's words on a terminal."""

import re
import sys

# A model's words must not move the cursor, or worse.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def tame(text: str) -> str:
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def printed(text: str) -> str:
    """A model's words as they go to stdout: a file gets them as they are."""
    return tame(text) if sys.stdout.isatty() else text
