"""Items of /v1/responses: checked, written as messages for the template, listed again."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from headrace.core.errors import RequestError
from headrace.protocols.fields.kinds import (
    Object,
    String,
    check_object,
    items_of,
    missing,
    required,
    shown,
    wrong_type,
    wrong_value,
)
from headrace.protocols.fields.messages import image_part, part_text
from headrace.protocols.fields.tools import flat_name
from headrace.protocols.progress_words import without_progress

MAX_ITEMS = 10_000
_ROLES = ("user", "assistant", "system", "developer")
_IMAGE = "input_image"
PAST = "previous_response_id"
"""The field that stands for all items of an earlier response."""

Item = dict[str, Any]


class Items(msgspec.Struct, frozen=True):
    """The field `input`, read as a tuple of items; a string is a message of the user's."""

    def check(self, value: Any, path: str) -> tuple[Item, ...]:
        if type(value) is str:
            return ({"type": "message", "role": "user", "content": _parts(value, "user")},)
        found = items_of(value, path, 1, MAX_ITEMS, "a string or an array of items")
        return tuple(_item(*each) for each in found)

    def schema(self) -> dict[str, Any]:
        item = {"type": "object", "properties": {"type": {"enum": [*_READERS, None]}}}
        items = {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_ITEMS}
        return {"anyOf": [{"type": "string"}, items]}


def messages_of(items: Iterable[Item], num_past: int = 0) -> tuple[dict[str, Any], ...]:
    """The messages for a chat template; images with the paths that they have in the request.

    Reasoning, text and calls of the assistant that follow each other in this order are one message.
    The first `num_past` items are an earlier response's.
    """
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        path = f"input[{number - num_past}]" if number >= num_past else PAST
        _ADDERS[item["type"]](messages, item, path)
    return tuple(messages)


def listed(items: Iterable[Item], stream_id: str) -> list[Item]:
    """The items with ids: their own, or those of their places, equal each time they are listed."""
    found = []
    for number, item in enumerate(items):
        id = item.get("id") or item_id(stream_id, item["type"], f"input {number}")
        more = {"status": "completed"} if item["type"] == "message" else {}
        found.append({"id": id} | more | item)
    return found


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def item_id(stream_id: str, kind: str, place: str) -> str:
    """The id of an item, the same for every reader of the log."""
    digest = hashlib.sha256(f"{stream_id}:{place}".encode()).hexdigest()
    return f"{_PREFIXES.get(kind, 'fco')}_{digest[:32]}"


def _item(value: Any, path: str) -> Item:
    check_object(value, path)
    kind = value.get("type") or "message"
    read = _READERS.get(kind) if type(kind) is str else None
    if read is None:
        raise RequestError(
            "unsupported_content",
            f"{path} is of type {shown(kind)}; this server takes {', '.join(_READERS)}.",
            f"{path}.type",
        )
    given = {"id": _string(value, "id", path)} if value.get("id") is not None else {}
    return given | {"type": kind} | read(value, path)


def _message(value: Item, path: str) -> Item:
    role = _string(value, "role", path)
    if role not in _ROLES:
        raise wrong_value(role, f"{path}.role", f"one of {', '.join(_ROLES)}")
    if value.get("content") is None:
        raise missing(f"{path}.content")
    return {"role": role, "content": _content(value["content"], role, f"{path}.content")}


def _call(value: Item, path: str) -> Item:
    names = ["call_id", "name", "arguments"]
    names += ["namespace"] if value.get("namespace") is not None else []
    return {name: _string(value, name, path) for name in names}


def _output(value: Item, path: str) -> Item:
    call_id = _string(value, "call_id", path)
    if value.get("output") is None:
        raise missing(f"{path}.output")
    parts = _content(value["output"], "user", f"{path}.output")
    has_image = any(part["type"] == _IMAGE for part in parts)
    return {"call_id": call_id, "output": parts if has_image else _text_of(parts)}


def _reasoning(value: Item, path: str) -> Item:
    """The text of reasoning; parts that another provider encrypted are left out."""
    texts = []
    for name in ("summary", "content"):
        parts = value.get(name) or []
        if type(parts) is not list:
            raise wrong_type(parts, f"{path}.{name}", "an array")
        texts.append(
            [
                {
                    "type": f"{name}_text" if name == "summary" else "reasoning_text",
                    "text": without_progress(_string(Object().check(part, place), "text", place)),
                }
                for part, place in ((p, f"{path}.{name}[{i}]") for i, p in enumerate(parts))
            ]
        )
    return {"summary": texts[0], "content": texts[1]}


def _content(value: Any, role: str, path: str) -> list[Item]:
    if type(value) is str:
        return _parts(value, role)
    if type(value) is not list:
        raise wrong_type(value, path, "a string or an array of parts")
    parts: list[Item] = []
    for i, part in enumerate(value):
        place = f"{path}[{i}]"
        if role != "assistant" and type(part) is dict and part.get("type") == _IMAGE:
            parts.append(_image(part, place))
        else:
            parts += _parts(part_text(part, place), role)
    return parts


def _image(part: Item, path: str) -> Item:
    """An image by its address. Files are stored by a provider; there are none here."""
    if part.get("image_url") is None and part.get("file_id") is not None:
        message = f"{path} names a file; send the image as a data URI in image_url."
        raise RequestError("unsupported_content", message, f"{path}.file_id")
    return {"type": _IMAGE, "image_url": _string(part, "image_url", path), "detail": "auto"}


def _parts(text: str, role: str) -> list[Item]:
    if role == "assistant":
        return [{"type": "output_text", "text": text, "annotations": []}]
    return [{"type": "input_text", "text": text}]


def _string(value: Item, name: str, path: str) -> str:
    return str(required(value, name, path, String()))


_READERS: dict[str, Callable[[Item, str], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _text_of(parts: list[Item]) -> str:
    return "".join(part["text"] for part in parts)


def _shown_parts(parts: list[Item], path: str) -> str | list[dict[str, Any]]:
    """A message's content: a text, or parts if there is an image among them."""
    if all(part["type"] != _IMAGE for part in parts):
        return _text_of(parts)
    return [
        image_part(part["image_url"], f"{path}[{i}]" if path != PAST else PAST)
        if part["type"] == _IMAGE
        else {"type": "text", "text": part["text"]}
        for i, part in enumerate(parts)
    ]


def _add_message(messages: list[dict[str, Any]], item: Item, path: str) -> None:
    if item["role"] != "assistant":
        content = _shown_parts(item["content"], path if path == PAST else f"{path}.content")
        messages.append({"role": item["role"], "content": content})
        return
    text = _text_of(item["content"])
    message = _open_assistant(messages)
    if message["content"] or "tool_calls" in message:
        message = _new_assistant(messages)
    message["content"] = text


def _add_call(messages: list[dict[str, Any]], item: Item, path: str) -> None:
    name = flat_name(item.get("namespace"), item["name"])
    function = {"name": name, "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    _open_assistant(messages).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], item: Item, path: str) -> None:
    content = item["output"]
    if not isinstance(content, str):
        content = _shown_parts(content, path if path == PAST else f"{path}.output")
    messages.append({"role": "tool", "content": content, "tool_call_id": item["call_id"]})


def _add_reasoning(messages: list[dict[str, Any]], item: Item, path: str) -> None:
    text = "".join(part["text"] for part in item["content"] or item["summary"])
    if text:
        message = _new_assistant(messages)
        message["reasoning_content"] = message["reasoning"] = text


_ADDERS: dict[str, Callable[[list[dict[str, Any]], Item, str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
}


def _open_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's last message if nothing follows it, else a new one."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[-1]
    return _new_assistant(messages)


def _new_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]
