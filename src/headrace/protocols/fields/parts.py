"""Reads the text of message parts. Accepts unknown parts, so that no history is refused."""

import base64
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

from headrace.protocols.fields.kinds import String, check_object, missing, required

TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
"""Types of text parts in the chat API and in the Responses API."""

_CARRIERS = (
    *("text", "refusal", "content", "output", "outputs", "results"),
    *("summary", "logs", "stdout", "stderr", "input", "message"),
    *("error", "reason"),
)
"""Fields in which unknown items and parts may have text. Other servers produced these items."""

ImageOf = Callable[[Any, str], dict[str, Any] | None]
"""Returns the image in a part, or None if the part has no image."""


def read_parts(
    parts: list[Any], path: str, image_of: ImageOf, skipped: list[str]
) -> str | list[dict[str, Any]]:
    """Return the text of the parts, or a list of parts if at least one part is an image.

    A part without text is left out, and the part's path is added to `skipped`.
    """
    found: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        place = f"{path}[{i}]"
        image = image_of(part, place)
        text = None if image else part_text(part, place)
        if image or text is not None:
            found.append(image or {"type": "text", "text": text})
        else:
            skipped.append(place)
    if any(part["type"] == "image" for part in found):
        return found
    return "".join(part["text"] for part in found)


def part_text(part: Any, path: str) -> str | None:
    """Return a part's text; None if there is no text. Raise RequestError for a malformed part."""
    check_object(part, path)
    kind = required(part, "type", path, String())
    if kind in TEXT_PARTS:
        if part.get("text") is None:
            raise missing(f"{path}.text")
        return String().check(part["text"], f"{path}.text")
    if kind in ("file", "input_file"):
        file = part.get("file", part)
        return file_text(file) if type(file) is dict else None
    return carried_text(part)


def carried_text(value: Any) -> str | None:
    """Return the text in a value of unknown shape, or None if there is no text."""
    if type(value) is str:
        return value or None
    if type(value) is list:
        texts = [carried_text(item) for item in value]
    elif type(value) is dict:
        texts = [carried_text(value[name]) for name in _CARRIERS if name in value]
    else:
        return None
    return "\n".join(text for text in texts if text) or None


def file_text(file: dict[str, Any]) -> str | None:
    """Return the name and the text of an attached file, or None if the file is not text."""
    data, name = file.get("file_data"), file.get("filename")
    if type(data) is not str:
        return None
    head, comma, rest = data.partition(",")
    if not comma:
        head, rest = ";base64", data
    try:
        is_base64 = head.endswith(";base64")
        content = base64.b64decode(rest, validate=True) if is_base64 else unquote_to_bytes(rest)
        text = content.decode()
    except ValueError:
        return None
    if "\0" in text or text.startswith("%PDF-"):
        return None
    return f"{name}:\n{text}\n" if type(name) is str and name else f"{text}\n"
