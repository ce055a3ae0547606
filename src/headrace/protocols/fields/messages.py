"""Checks the messages of a chat, and writes them as chat templates expect them."""

import base64
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

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
    wrong_type,
)
from headrace.protocols.fields.parts import TEXT_PARTS, read_parts
from headrace.protocols.progress_text import without_progress
from headrace.text.merging import merge_contents
from headrace_common.errors import RequestError
from headrace_common.request import MAX_IMAGE_BYTES

MAX_MESSAGES = 10_000
MAX_IMAGES = 16
# The maximum number of characters in an image's address.
_MAX_ADDRESS = 8192
TEXT_ONLY = "this model takes text only"
IMAGE_PART = "image_url"
_SCHEMES = ("http://", "https://")
_PARTS = (*TEXT_PARTS[:3], "refusal", "file")
ROLES = ("system", "developer", "user", "assistant", "tool")
_AS_THEY_ARE: dict[str, Kind] = {
    "name": String(),
    "tool_call_id": String(),
    "reasoning_content": String(),
    "reasoning": String(),
}

_CALLS = Array(Object(), most=128)
_REASONING = ("reasoning_content", "reasoning")
_FUNCTION = "function"
"""The role of a function's result in the chat API of 2023."""


class PlacedImage(msgspec.Struct, frozen=True):
    """An image in a body of another API: the image's address, and the image's path in the body."""

    url: str
    path: str


class ReadMessages(tuple[dict[str, Any], ...]):
    """Messages as the template sees them, with the paths of the parts that were left out."""

    skipped: tuple[str, ...] = ()


class Messages(msgspec.Struct, frozen=True):
    """Reads the field `messages` as ReadMessages; accepts messages that other providers wrote."""

    def check(self, value: Any, path: str) -> ReadMessages:
        skipped: list[str] = []
        found = items_of(value, path, 1, MAX_MESSAGES)
        messages = ReadMessages(_message(*each, skipped) for each in found)
        messages.skipped = tuple(skipped)
        return messages

    def schema(self) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"enum": list(_PARTS)}, "text": {"type": "string"}},
            "required": ["type"],
        }
        url = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
        image = {
            "type": "object",
            "properties": {"type": {"const": IMAGE_PART}, IMAGE_PART: url},
            "required": ["type", IMAGE_PART],
        }
        # A part from another provider: the part is skipped and named in a response header.
        other = {
            "type": "object",
            "properties": {"type": {"type": "string", "not": {"enum": [*_PARTS, IMAGE_PART]}}},
            "required": ["type"],
        }
        parts = {"type": "array", "items": {"anyOf": [part, image, other]}}
        content = [{"type": "string"}, parts, {"type": "null"}]
        kinds = _AS_THEY_ARE | {"tool_calls": _CALLS}
        properties = {name: nullable(kind) for name, kind in kinds.items()}
        message = {
            "type": "object",
            "properties": {
                "role": {"type": "string", "examples": [*ROLES, _FUNCTION]},
                "content": {"anyOf": content},
            }
            | properties,
            "required": ["role"],
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES}


def _message(value: Any, path: str, skipped: list[str]) -> dict[str, Any]:
    check_object(value, path)
    role = required(value, "role", path, String())
    if role not in (*ROLES, _FUNCTION):
        skipped.append(f"{path}.role")
        role = "user"
    message = {"role": role, "content": _content(value, role, path, skipped)}
    for name, kind in _AS_THEY_ARE.items():
        if value.get(name) is not None:
            kind.check(value[name], f"{path}.{name}")
            message[name] = value[name]
    if calls := _calls(value, path, skipped):
        message["tool_calls"] = calls
    if role == _FUNCTION:
        message |= {"role": "tool", "tool_call_id": _old_id(message.get("name", ""))}
    for name in _REASONING:
        if name in message and not (own := without_progress(message[name])):
            del message[name]
        elif name in message:
            message[name] = own
    return message


def _content(
    message: dict[str, Any], role: str, path: str, skipped: list[str]
) -> str | list[dict[str, Any]]:
    value, path = message.get("content"), f"{path}.content"
    refusal = message.get("refusal")
    refusal = refusal if type(refusal) is str else ""
    if value is None:
        if role != "assistant" and "content" not in message:
            raise missing(path)
        # Templates would print None as a word.
        return refusal
    if type(value) is list:
        value = read_parts(value, path, _image_of, skipped)
    elif type(value) is not str:
        raise wrong_type(value, path, "a string or an array of parts")
    return merge_contents((value, refusal), "\n")


def _calls(message: dict[str, Any], path: str, skipped: list[str]) -> list[dict[str, Any]]:
    """Return an assistant's calls as function calls, the only calls that templates know."""
    tool_calls = message.get("tool_calls")
    found = [] if tool_calls is None else _CALLS.check(tool_calls, f"{path}.tool_calls")
    calls = []
    for i, call in enumerate(found):
        own = call.get(str(call.get("type")))
        if "function" in call or type(own) is not dict:
            calls.append(call)
        elif type(own.get("name")) is str:
            calls.append(_custom_call(call, own, f"{path}.tool_calls[{i}].{call['type']}"))
        else:
            skipped.append(f"{path}.tool_calls[{i}]")
    old = message.get("function_call")
    if type(old) is dict and type(old.get("name")) is str:
        function = {"name": old["name"], "arguments": old.get("arguments") or "{}"}
        calls.append({"id": _old_id(old["name"]), "type": "function", "function": function})
    return calls


def _custom_call(call: dict[str, Any], own: dict[str, Any], path: str) -> dict[str, Any]:
    text = String().check(own.get("input", ""), f"{path}.input")
    function = {"name": own["name"], "arguments": arguments_of_text(text)}
    rest = {name: call[name] for name in ("id",) if call.get(name) is not None}
    return rest | {"type": "function", "function": function}


def arguments_of_text(text: str) -> str:
    """Return the text of a custom call as arguments: the model knows the tool as a function."""
    return msgspec.json.encode({"input": text}).decode()


def _old_id(name: str) -> str:
    """Return an id that links a `function_call` to its result. In the body, both have no id."""
    return f"call_{name}"


def _image_of(part: Any, path: str) -> dict[str, Any] | None:
    """Return the image in a part, or None. The image's address is checked later."""
    if type(part) is PlacedImage:
        return image_part(part.url, part.path)
    if type(part) is not dict or part.get("type") not in (IMAGE_PART, "input_image"):
        return None
    image = part.get(IMAGE_PART)
    # Clients of the Responses API send the address itself.
    if type(image) is not str:
        image = Object().check(image, f"{path}.{IMAGE_PART}").get("url")
    return image_part(String().check(image, f"{path}.{IMAGE_PART}.url"), path)


def image_part(url: str, path: str) -> dict[str, Any]:
    """Return an image as a part that `take_images` recognizes."""
    return {"type": "image", "url": url, "path": path}


def _image(url: str, path: str) -> bytes:
    """Return the bytes of a data URI; return no bytes for an http address."""
    if _address(url):
        return b""
    if url[:5].lower() != "data:":
        message = "This is not the address of an image; send data:image/png;base64,… instead."
        raise RequestError("image_url_refused", message, path)
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError("invalid_image", "The image's data URI is not base64.", path)
    num_bytes = len(data) * 3 // 4 - data[-2:].count("=")
    if num_bytes > MAX_IMAGE_BYTES:
        raise RequestError(
            "image_too_large",
            f"The image has {num_bytes} bytes; the limit is {MAX_IMAGE_BYTES}. "
            "Send a smaller image.",
            path,
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise RequestError("invalid_image", "The image is not valid base64.", path) from None


def _address(url: str) -> str:
    return url if len(url) <= _MAX_ADDRESS and url[:8].lower().startswith(_SCHEMES) else ""


class ChatImages(NamedTuple):
    """Messages as templates see them, and the messages' images, as fields of a chat body."""

    messages: tuple[dict[str, Any], ...]
    images: tuple[bytes, ...]
    image_params: tuple[str, ...]
    addresses: tuple[str, ...]


def without_images(
    messages: tuple[dict[str, Any], ...],
) -> tuple[tuple[dict[str, Any], ...], list[tuple[str, str]]]:
    """Return the messages as templates see them, and the address and the path of each image."""
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
    return tuple(seen), images


def take_images(messages: tuple[dict[str, Any], ...]) -> ChatImages:
    seen, images = without_images(messages)
    if len(images) > MAX_IMAGES:
        raise RequestError(
            "image_too_large",
            f"The request has {len(images)} images; the limit is {MAX_IMAGES}. Send fewer images.",
            images[MAX_IMAGES][1],
        )
    decoded = tuple(_image(url, path) for url, path in images)
    addresses = tuple(_address(url) for url, _ in images)
    paths = tuple(path for _, path in images)
    return ChatImages(seen, decoded, paths, addresses if any(addresses) else ())


def texts_of(content: Any) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


def refuse_images(messages: Iterable[dict[str, Any]], why: str) -> None:
    """Raise RequestError with the path of the first image, if there is one."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if type(content) is list for part in content]
    for part in parts:
        if part.get("type") == "image" and "path" in part:
            raise unseen(part["path"], why)


def unseen(path: str, why: str) -> RequestError:
    """Return the error for an image that the model or the route cannot use; `why` is the reason."""
    message = f"{path} is an image; {why}."
    return RequestError("unsupported_content", message, f"{path}.type")


def placeholder_in_text(param: str) -> RequestError:
    """Return the error for a text with a token that stands for an image."""
    message = "The text has a token that stands for an image; send the image as a part instead."
    return RequestError("invalid_value", message, param)
