"""Opens files of a model's folder, and refuses pipes, devices and oversized files."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headrace_common.errors import ModelError

# The longest shard indexes have a few MiB.
MAX_BYTES = 32 << 20
MAX_TEXT = 128 << 20
"""Limit in bytes for files with a vocabulary; the largest known tokenizer.json has 35 MB."""
_TEXTS = (".json", ".jinja", ".txt", ".model")
_SHOWN_CHARS = 100  # characters of a file's name in a message


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises OSError if the file is not regular, unreadable or too long.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"more than {max_bytes:,} bytes", str(path))
    return content


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises OSError if the file is not regular or cannot be read.

    A pipe is opened without waiting for its writer, and a device is never read. Otherwise opening
    the pipe or reading the device could block forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file", str(path))
        yield file


def check_texts(folder: Path) -> None:
    """Check the text files that a library may read.

    Raises OSError if a file is too long or not regular. A library would read the whole of a long
    file, and would wait for a pipe or a device forever.
    """
    for file in folder.iterdir():
        if file.suffix in _TEXTS and file.exists():
            with open_regular(file) as opened:
                size = os.fstat(opened.fileno()).st_size
            if size > MAX_TEXT:
                raise OSError(0, f"more than {MAX_TEXT:,} bytes", str(file))


@contextlib.contextmanager
def unreadable_refused() -> Iterator[None]:
    """Raise ModelError if a model's file cannot be read or is not valid Unicode."""
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else "A file of the model"
        shown = ascii(os.path.basename(name)[:_SHOWN_CHARS])[1:-1]
        raise ModelError(
            f"{shown} cannot be read ({error.strerror or type(error).__name__}); check the disk "
            "and the file's permissions, or download the model again.",
            "model_corrupt",
        ) from error
    except UnicodeError as error:
        raise ModelError(
            "A file of the model holds text that is not valid Unicode; download the model again.",
            "model_corrupt",
        ) from error
