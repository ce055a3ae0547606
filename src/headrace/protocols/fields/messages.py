"""Messages of a chat: checked, and written as chat templates expect them."""

import base64
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from headrace.core.errors import RequestError
from headrace.core.request import MAX_IMAGE_BYTES
from headrace.protocols.fields.kinds import (
    Array,
    Kind,
    Object,
    String,
    check_object,
    items_of,
    missing,
    nullable,
    required,
    shown,
    wrong_type,
    wrong_value,
)
from headrace.protocols.progress_words import without_progress

MAX_MESSAGES = 10_000
MAX_IMAGES = 16
_MAX_ADDRESS = 8192  # characters
IMAGE_PART = "image_url"
_SCHEMES = ("http://", "https://")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Text in a chat's words, and in those of clients that speak of responses."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_AS_THEY_ARE: dict[str, Kind] = {
    "name": String(),
    "tool_calls": Array(Object(), most=128),
    "tool_call_id": String(),
    "reasoning_content": String(),
    "reasoning": String(),
}

_REASONING = ("reasoning_content", "reasoning")


class PlacedImage(msgspec.Struct, frozen=True):
    """An image's address, and where in its request it stands: a part from another route's body."""

    url: str
    path: str


class Messages(msgspec.Struct, frozen=True):
    """The field `messages`, read as a tuple of what the template will see."""

    def check(self, value: Any, path: str) -> tuple[dict[str, Any], ...]:
        return tuple(_message(*each) for each in items_of(value, path, 1, MAX_MESSAGES))

    def schema(self) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        url = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
        image = {
            "type": "object",
            "properties": {"type": {"const": IMAGE_PART}, IMAGE_PART: url},
            "required": ["type", IMAGE_PART],
        }
        parts = {"type": "array", "items": {"anyOf": [part, image]}}
        content = [{"type": "string"}, parts, {"type": "null"}]
        properties = {name: nullable(kind) for name, kind in _AS_THEY_ARE.items()}
        message = {
            "type": "object",
            "properties": {"role": {"enum": list(ROLES)}, "content": {"anyOf": content}}
            | properties,
            "required": ["role"],
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES}


def _message(value: Any, path: str) -> dict[str, Any]:
    check_object(value, path)
    role = required(value, "role", path, String())
    if role not in ROLES:
        raise wrong_value(role, f"{path}.role", f"one of {', '.join(ROLES)}")
    message = {"role": role, "content": _content(value.get("content"), role, f"{path}.content")}
    for name, kind in _AS_THEY_ARE.items():
        if value.get(name) is not None:
            kind.check(value[name], f"{path}.{name}")
            message[name] = value[name]
    for name in _REASONING:
        if name in message and not (own := without_progress(message[name])):
            del message[name]
        elif name in message:
            message[name] = own
    return message


def _content(value: Any, role: str, path: str) -> str | list[dict[str, Any]]:
    if value is None:
        if role != "assistant":
            raise missing(path)
        return ""  # templates print None as a word
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(value, path, "a string or an array of parts")
    if any(_is_image(part) for part in value):
        return [_part(part, f"{path}[{i}]") for i, part in enumerate(value)]
    return "".join(part_text(part, f"{path}[{i}]") for i, part in enumerate(value))


def _is_image(part: Any) -> bool:
    return type(part) is PlacedImage or (type(part) is dict and part.get("type") == IMAGE_PART)


def _part(value: Any, path: str) -> dict[str, Any]:
    """A text, or an image's address and path: whether it is sound is asked once it is wanted."""
    if not _is_image(value):
        return {"type": "text", "text": part_text(value, path)}
    if type(value) is PlacedImage:
        return image_part(value.url, value.path)
    image = Object().check(value.get(IMAGE_PART), f"{path}.{IMAGE_PART}")
    url = String().check(image.get("url"), f"{path}.{IMAGE_PART}.url")
    return image_part(url, path)


def image_part(url: str, path: str) -> dict[str, Any]:
    """An image as `take_images` finds it in a message's content."""
    return {"type": "image", "url": url, "path": path}


def _image(url: str, path: str) -> bytes:
    """The bytes in a data URI; none yet of what stands at an address."""
    if _address(url):
        return b""
    if url[:5].lower() != "data:":
        message = "This is no image's address; send data:image/png;base64,… instead."
        raise RequestError("image_url_refused", message, path)
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError("invalid_image", "The image's data URI is not base64.", path)
    num_bytes = len(data) * 3 // 4 - data[-2:].count("=")
    if num_bytes > MAX_IMAGE_BYTES:
        raise RequestError(
            "image_too_large",
            f"The image has {num_bytes} bytes, and {MAX_IMAGE_BYTES} are taken; send a "
            "smaller one.",
            path,
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise RequestError("invalid_image", "The image is not valid base64.", path) from None


def _address(url: str) -> str:
    return url if len(url) <= _MAX_ADDRESS and url[:8].lower().startswith(_SCHEMES) else ""


class TakenImages(NamedTuple):
    """Messages as templates see them, and their images, as Chat has them."""

    messages: tuple[dict[str, Any], ...]
    images: tuple[bytes, ...]
    image_params: tuple[str, ...]
    addresses: tuple[str, ...]


def take_images(messages: tuple[dict[str, Any], ...]) -> TakenImages:
    images: list[tuple[str, str]] = []
    seen = []
    for message in messages:
        content = message["content"]
        if type(content) is list:
            found = [part for part in content if part["type"] == "image"]
            images += [(part["url"], part["path"]) for part in found]
            shown = [{"type": "image"} if part["type"] == "image" else part for part in content]
            message = message | {"content": shown}
        seen.append(message)
    if len(images) > MAX_IMAGES:
        raise RequestError(
            "image_too_large",
            f"The request has {len(images)} images, and {MAX_IMAGES} are taken; send fewer.",
            images[MAX_IMAGES][1],
        )
    decoded = tuple(_image(url, path) for url, path in images)
    addresses = tuple(_address(url) for url, _ in images)
    paths = tuple(path for _, path in images)
    return TakenImages(tuple(seen), decoded, paths, addresses if any(addresses) else ())


def texts_of(content: Any) -> str:
    """The text in a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


def refuse_images(messages: Iterable[dict[str, Any]], why: str) -> None:
    """RequestError with the path of the first image, if there is one."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if type(content) is list for part in content]
    for part in parts:
        if part.get("type") == "image" and "path" in part:
            raise unseen(part["path"], why)


def unseen(path: str, why: str) -> RequestError:
    """The image at `path` is not looked at."""
    message = f"{path} is an image; {why}."
    return RequestError("unsupported_content", message, f"{path}.type")


def placeholder_in_text(param: str) -> RequestError:
    """A text must not stand for an image that was not sent."""
    message = "The text has a token that stands for an image; send the image as a part instead."
    return RequestError("invalid_value", message, param)


def part_text(value: Any, path: str) -> str:
    """The text of one part; RequestError if it is of another kind."""
    check_object(value, path)
    for name in ("type", "text"):
        given = value.get(name)
        if given is None:
            raise missing(f"{path}.{name}")
        if name == "type" and String().check(given, f"{path}.type") not in TEXT_PARTS:
            raise RequestError(
                "unsupported_content",
                f"{path} is of type {shown(given)}; this model takes text only.",
                f"{path}.type",
            )
    return String().check(value["text"], f"{path}.text")
