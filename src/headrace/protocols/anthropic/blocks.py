"""Turns the content blocks of Anthropic's clients into texts and images.

Also reads blocks that another server produced.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.protocols.fields.kinds import (
    Object,
    String,
    check_object,
    missing,
    required,
    wrong_type,
    wrong_value,
)
from headrace.protocols.fields.messages import PlacedImage

MAX_SKIPPED = 64
"""Maximum number of skipped blocks whose paths are recorded for a response header."""

CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_IMAGE_TYPES = tuple(f"image/{kind}" for kind in ("png", "jpeg", "webp", "gif", "bmp"))
_TEXT_TYPES = ("text/", "application/json", "application/xml")
_TEXT_FIELDS = (
    *("title", "url", "text", "content", "output", "summary", "input", "stdout", "stderr"),
    *("lines", "tool_references", "error_code", "error_message"),
)
"""Fields that can contain texts or nested blocks, in the blocks of any server."""

Part = str | PlacedImage
Content = str | list[dict[str, Any] | PlacedImage]
"""The content of a message: a text, or a list of parts if at least one part is an image."""


class PlacedBlock(NamedTuple):
    """A block and its path in the body."""

    value: dict[str, Any]
    path: str
    kind: str


def placed(value: Any, path: str) -> list[PlacedBlock]:
    """Return the blocks of a content as a list. A string or an object becomes a single block."""
    if value is None:
        raise missing(path)
    if type(value) is str:
        return [PlacedBlock({"type": "text", "text": value}, path, "text")]
    if type(value) is dict:
        return [_placed(value, path)]
    if type(value) is not list:
        raise wrong_type(value, path, "a string or an array of blocks")
    return [_placed(block, f"{path}[{i}]") for i, block in enumerate(value)]


def _placed(value: Any, path: str) -> PlacedBlock:
    check_object(value, path)
    kind = value.get("type")
    return PlacedBlock(value, path, "" if kind is None else String().check(kind, f"{path}.type"))


def parts_of(block: PlacedBlock, skipped: list[str]) -> list[Part]:
    """Return the readable parts of a block; add the paths of unreadable blocks to `skipped`."""
    value, path = block.value, block.path
    match block.kind:
        case "text":
            return [required(value, "text", path, String())]
        case "image":
            return _image(block, skipped)
        case "document":
            return _document(block, skipped)
        case "search_result":
            content = _parts_within(value.get("content"), f"{path}.content", skipped)
            return _framed(block, ("title", "source"), content)
        case "tool_reference":
            return [f"The tool {required(value, 'tool_name', path, String())} is available.\n"]
    num_skipped = len(skipped)
    parts: list[Part] = []
    for name in _TEXT_FIELDS:
        if found := _parts_within(value.get(name), f"{path}.{name}", skipped):
            parts += found if _ends_line(found[-1]) else [*found, "\n"]
    if not parts and len(skipped) == num_skipped:
        skip(path, skipped)
    return parts


def content_of(parts: list[Part]) -> Content:
    """Return the parts as the content of a chat message."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    return [_text_part(part) if isinstance(part, str) else part for part in parts]


def _parts_within(value: Any, path: str, skipped: list[str]) -> list[Part]:
    """Return the parts of a value: a text, a block, a JSON object, or a list of such values."""
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, dict) and (path.endswith(".input") or type(value.get("type")) is not str):
        return [json.dumps(value, ensure_ascii=False)] if value else []
    if isinstance(value, dict):
        return parts_of(_placed(value, path), skipped)
    if isinstance(value, list):
        return list(_items(value, path, skipped))
    return []


def _items(items: list[Any], path: str, skipped: list[str]) -> Iterator[Part]:
    for i, item in enumerate(items):
        if isinstance(item, str):
            yield f"{item}\n"
        elif isinstance(item, dict):
            yield from _parts_within(item, f"{path}[{i}]", skipped)


def _image(block: PlacedBlock, skipped: list[str]) -> list[Part]:
    path = f"{block.path}.source"
    source = Object().check(block.value.get("source") or {}, path)
    kind = source.get("type")
    if kind == "url":
        return [PlacedImage(required(source, "url", path, String()), block.path)]
    if kind != "base64":
        return _left_out(block, skipped)
    media_type = required(source, "media_type", path, String())
    if media_type not in _IMAGE_TYPES:
        raise wrong_value(media_type, f"{path}.media_type", f"one of {', '.join(_IMAGE_TYPES)}")
    data = required(source, "data", path, String())
    return [PlacedImage(f"data:{media_type};base64,{data}", block.path)]


def _document(block: PlacedBlock, skipped: list[str]) -> list[Part]:
    path = f"{block.path}.source"
    source = Object().check(block.value.get("source") or {}, path)
    match source.get("type"):
        case "text":
            content: list[Part] = [required(source, "data", path, String())]
        case "content":
            content = _parts_within(source.get("content"), f"{path}.content", skipped)
        case "base64" if str(source.get("media_type")).startswith(_TEXT_TYPES):
            try:
                data = base64.b64decode(required(source, "data", path, String()))
            except ValueError:
                return _left_out(block, skipped)
            content = [data.decode(errors="replace")]
        case _:
            return _left_out(block, skipped)
    return _framed(block, ("title", "context"), content)


def _framed(block: PlacedBlock, heads: tuple[str, ...], content: list[Part]) -> list[Part]:
    """Enclose the content in two tags, so that the model sees where the content begins and ends."""
    values = [(name, block.value.get(name)) for name in heads]
    lines = [f"{name.capitalize()}: {it}\n" for name, it in values if it and isinstance(it, str)]
    end = "" if content and _ends_line(content[-1]) else "\n"
    return [f"<{block.kind}>\n{''.join(lines)}", *content, f"{end}</{block.kind}>\n"]


def _left_out(block: PlacedBlock, skipped: list[str]) -> list[Part]:
    """Return a line in place of an unreadable block, to tell the model that a block is missing."""
    skip(block.path, skipped)
    title = block.value.get("title")
    named = f" {title}" if title and isinstance(title, str) else ""
    return [f"[The {block.kind}{named} was left out: this server cannot read it.]\n"]


def skip(path: str, skipped: list[str]) -> None:
    if len(skipped) < MAX_SKIPPED:
        skipped.append(path)


def _ends_line(part: Part) -> bool:
    return isinstance(part, str) and part.endswith("\n")


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
