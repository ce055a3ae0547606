"""Reads files that are attached to a message of `headrace chat`: texts and images."""

import base64
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from headrace_common.errors import ConfigError

MAX_TEXT_BYTES = 1 << 20
MAX_IMAGE_BYTES = 8 << 20
# Media types by the first bytes of a file.
_IMAGES = {
    b"\x89PNG\r\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


class Attachment(NamedTuple):
    """A file as a content part of a message, with a description for the user."""

    part: dict[str, Any]
    words: str


def read_attachment(path: str, sees: bool) -> Attachment:
    """Read a file. Raises ConfigError with the reason if the file cannot be attached."""
    file = Path(os.path.expanduser(path))
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            data = opened.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}.") from None
    kind = next((kind for begin, kind in _IMAGES.items() if data.startswith(begin)), None)
    limit = MAX_TEXT_BYTES if kind is None else MAX_IMAGE_BYTES
    if len(data) > limit:
        raise ConfigError(f"{path} has {size:,} bytes; at most {limit:,} can be attached.")
    if kind is not None:
        if not sees:
            raise ConfigError(f"{path} is an image, but this model accepts text only.")
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        return Attachment(part, f"{file.name}, image, {size:,} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is neither text in UTF-8 nor an image.") from None
    return Attachment(_as_text(file, text), f"{file.name}, {len(text):,} characters")


def _as_text(file: Path, text: str) -> dict[str, Any]:
    """Return the file's name and then its text, in a code fence that does not occur in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    lines = text if text.endswith("\n") else f"{text}\n"
    shown = f"{file.name}:\n{fence}{file.suffix.removeprefix('.')}\n{lines}{fence}"
    return {"type": "text", "text": shown}


def message_of(text: str, attached: list[Attachment]) -> dict[str, Any]:
    """Return the user's message, with the attached files first."""
    if not attached:
        return {"role": "user", "content": text}
    parts = [one.part for one in attached]
    # A model without images accepts a string, but not a list of parts.
    if all(part["type"] == "text" for part in parts):
        texts = [part["text"] for part in parts]
        return {"role": "user", "content": "\n\n".join([*texts, text])}
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
