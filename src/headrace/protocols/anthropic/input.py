"""Bodies of Anthropic's clients, checked and written as chat's fields; knows no events."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.core.errors import RequestError
from headrace.protocols.fields.kinds import (
    Flag,
    Integer,
    Object,
    String,
    check_count,
    check_object,
    items_of,
    missing,
    nullable,
    required,
    shown,
    wrong_type,
    wrong_value,
)
from headrace.protocols.fields.messages import MAX_MESSAGES, PlacedImage
from headrace.protocols.fields.tools import MAX_TOOLS
from headrace.protocols.progress_words import without_progress

_MAX_CALLS = 128  # in one message
_TAKEN = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""Types of blocks, by role."""
_IN_RESULTS = ("text", "image")
_IMAGE_TYPES = tuple(f"image/{kind}" for kind in ("png", "jpeg", "webp", "gif", "bmp"))

_NAME = String(1)
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class SystemPrompt(msgspec.Struct, frozen=True):
    """A string or text blocks, read as one text."""

    def check(self, value: Any, path: str) -> str:
        return "".join(_texts(value, path))

    def schema(self) -> dict[str, Any]:
        return _CONTENT


class Turns(msgspec.Struct, frozen=True):
    """The field `messages`, read as what the chat template will see."""

    def check(self, value: Any, path: str) -> list[dict[str, Any]]:
        written = _Written()
        for each in items_of(value, path, 1, MAX_MESSAGES):
            written.add(*each)
        return written.messages

    def schema(self) -> dict[str, Any]:
        turn = {
            "type": "object",
            "properties": {"role": {"enum": list(_TAKEN)}, "content": _CONTENT},
            "required": ["role", "content"],
        }
        return {"type": "array", "items": turn, "minItems": 1, "maxItems": MAX_MESSAGES}


class _Written:
    """Messages as they are written; a turn that follows one of its own role is joined to it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the tools that were called, by the call's id

    def add(self, turn: Any, path: str) -> None:
        check_object(turn, path)
        role = required(turn, "role", path, String())
        if role not in _TAKEN:
            raise wrong_value(role, f"{path}.role", f"one of {', '.join(_TAKEN)}")
        blocks = _blocks(turn.get("content"), f"{path}.content", _TAKEN[role])
        if role == "assistant":
            self._put(self._assistant(blocks))
            return
        parts: list[_Part] = []
        for number, (block, block_path) in enumerate(blocks):
            if block["type"] != "tool_result":
                parts.append(_part(block, block_path))
                continue
            if content := _content(parts):
                self._put({"role": role, "content": content})
            self._put(self._result(block, block_path))
            parts = []
            if number == len(blocks) - 1:
                return
        self._put({"role": role, "content": _content(parts)})

    def _put(self, message: dict[str, Any]) -> None:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != message["role"] or message["role"] == "tool":
            self.messages.append(message)
            return
        for key in ("content", "reasoning_content"):
            if contents := [it[key] for it in (last, message) if it.get(key)]:
                last[key] = _joined(*contents)
        if "tool_calls" in message:
            last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]

    def _assistant(self, blocks: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
        text, thoughts, calls = "", "", []
        for block, path in blocks:
            match block["type"]:
                case "text":
                    text += _text(block, path)
                case "thinking":
                    thoughts += without_progress(required(block, "thinking", path, String()))
                case "tool_use":
                    calls.append(self._call(block, path))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts:
            message["reasoning_content"] = thoughts  # which of them are shown, the template knows
        if len(calls) > _MAX_CALLS:
            check_count(len(calls), blocks[0][1].rpartition("[")[0], 0, _MAX_CALLS)
        return message | {"tool_calls": calls} if calls else message

    def _call(self, block: dict[str, Any], path: str) -> dict[str, Any]:
        call_id, name = required(block, "id", path, _NAME), required(block, "name", path, _NAME)
        self._names[call_id] = name
        function = {"name": name, "arguments": required(block, "input", path, Object())}
        return {"id": call_id, "type": "function", "function": function}

    def _result(self, block: dict[str, Any], path: str) -> dict[str, Any]:
        call_id = required(block, "tool_use_id", path, _NAME)
        content = block.get("content")
        blocks = [] if content is None else _blocks(content, f"{path}.content", _IN_RESULTS)
        result = _content([_part(*each) for each in blocks])
        is_error = block.get("is_error")
        if is_error is not None and Flag().check(is_error, f"{path}.is_error"):
            # templates have no other place to say so
            text = result if isinstance(result, str) else ""
            result = result if text.lower().startswith("error") else _prefixed("Error: ", result)
        message = {"role": "tool", "tool_call_id": call_id, "content": result}
        name = self._names.get(call_id)
        return message | {"name": name} if name else message


class ClientTools(msgspec.Struct, frozen=True):
    """The field `tools`, as chat takes it; those that Anthropic's servers run are refused."""

    def check(self, value: Any, path: str) -> list[dict[str, Any]]:
        return [_tool(*each) for each in items_of(value, path, 0, MAX_TOOLS)]

    def schema(self) -> dict[str, Any]:
        tool = {
            "type": "object",
            "properties": {
                "type": {"enum": ["custom", None]},
                "name": {"type": "string"},
                "description": nullable(String()),
                "input_schema": {"type": "object"},
            },
            "required": ["name", "input_schema"],
        }
        return {"type": "array", "items": tool, "maxItems": MAX_TOOLS}


def _tool(value: Any, path: str) -> dict[str, Any]:
    check_object(value, path)
    if value.get("type") not in (None, "custom"):
        message = f"{path} is of type {shown(value['type'])}; this server takes custom tools only."
        raise RequestError("unsupported_parameter", message, f"{path}.type")
    function = {"name": required(value, "name", path, _NAME)}
    if value.get("description") is not None:
        function["description"] = required(value, "description", path, String())
    function["parameters"] = required(value, "input_schema", path, Object())
    if value.get("strict") is not None:
        function["strict"] = required(value, "strict", path, Flag())
    return {"type": "function", "function": function}


_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


class ToolUse(NamedTuple):
    """The wanted tool in the words of chat's tool_choice, and whether several calls may come."""

    wanted: str | dict[str, Any] = "auto"
    is_parallel: bool = True


class ToolUseChoice(msgspec.Struct, frozen=True):
    """auto, any, none or one tool by name."""

    def check(self, value: Any, path: str) -> ToolUse:
        check_object(value, path)
        kind = required(value, "type", path, String())
        only_one = value.get("disable_parallel_tool_use")
        if only_one is not None:
            Flag().check(only_one, f"{path}.disable_parallel_tool_use")
        if kind == "tool":
            name = required(value, "name", path, _NAME)
            return ToolUse({"type": "function", "function": {"name": name}}, not only_one)
        if kind not in _CHOICES:
            raise wrong_value(kind, f"{path}.type", f"tool or one of {', '.join(_CHOICES)}")
        return ToolUse(_CHOICES[kind], not only_one)

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {
            "type": {"enum": [*_CHOICES, "tool"]},
            "disable_parallel_tool_use": nullable(Flag()),
        }
        return {"type": "object", "properties": properties, "required": ["type"]}


_THINKS: Mapping[str, bool] = {"enabled": True, "adaptive": True, "disabled": False}


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model should think first. How long is its own choice: no budget is enforced."""

    def check(self, value: Any, path: str) -> bool:
        check_object(value, path)
        kind = required(value, "type", path, String())
        if kind not in _THINKS:
            raise wrong_value(kind, f"{path}.type", f"one of {', '.join(_THINKS)}")
        if value.get("budget_tokens") is not None:
            Integer(1).check(value["budget_tokens"], f"{path}.budget_tokens")
        return _THINKS[kind]

    def schema(self) -> dict[str, Any]:
        properties = {"type": {"enum": list(_THINKS)}, "budget_tokens": nullable(Integer(1))}
        return {"type": "object", "properties": properties, "required": ["type"]}


class OutputFormat(msgspec.Struct, frozen=True):
    """A JSON schema for the answer, as chat's response_format."""

    def check(self, value: Any, path: str) -> dict[str, Any]:
        check_object(value, path)
        kind = required(value, "type", path, String())
        if kind != "json_schema":
            raise wrong_value(kind, f"{path}.type", "json_schema")
        schema = required(value, "schema", path, Object())
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    def schema(self) -> dict[str, Any]:
        properties = {"type": {"const": "json_schema"}, "schema": {"type": "object"}}
        return {"type": "object", "properties": properties, "required": ["type", "schema"]}


class NotServed(msgspec.Struct, frozen=True):
    """A field that asks for what only Anthropic's servers do."""

    def check(self, value: Any, path: str) -> None:
        if value not in ("", [], {}):
            message = f"{path} is not supported here; leave it out."
            raise RequestError("unsupported_parameter", message, path)

    def schema(self) -> dict[str, Any]:
        return {"enum": ["", [], {}]}


_Part = str | PlacedImage
_Content = str | list[dict[str, Any] | PlacedImage]
"""Content of a message: a text, or parts if there is an image among them."""


def _part(block: dict[str, Any], path: str) -> _Part:
    if block["type"] == "text":
        return _text(block, path)
    source = required(block, "source", path, Object())
    kind = required(source, "type", f"{path}.source", String())
    if kind == "url":
        return PlacedImage(required(source, "url", f"{path}.source", String()), path)
    if kind != "base64":
        message = f"{path}.source is of type {shown(kind)}; it must be base64."
        raise RequestError("unsupported_content", message, f"{path}.source.type")
    media_type = required(source, "media_type", f"{path}.source", String())
    if media_type not in _IMAGE_TYPES:
        place = f"{path}.source.media_type"
        raise wrong_value(media_type, place, f"one of {', '.join(_IMAGE_TYPES)}")
    data = required(source, "data", f"{path}.source", String())
    return PlacedImage(f"data:{media_type};base64,{data}", path)


def _content(parts: list[_Part]) -> _Content:
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    return [_text_part(part) if isinstance(part, str) else part for part in parts]


def _joined(*contents: _Content) -> _Content:
    """The contents of turns that follow each other, each on a line of its own."""
    if all(isinstance(content, str) for content in contents):
        return "\n".join(map(str, contents))
    first, *others = ([_text_part(c)] if isinstance(c, str) else c for c in contents)
    return [*first, *(part for other in others for part in (_text_part("\n"), *other))]


def _prefixed(prefix: str, content: _Content) -> _Content:
    if isinstance(content, str):
        return prefix + content
    return [_text_part(prefix), *content]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _blocks(value: Any, path: str, types: tuple[str, ...]) -> list[tuple[dict[str, Any], str]]:
    """The blocks of a content and where each stands; a string is one block of text."""
    if value is None:
        raise missing(path)
    if type(value) is str:
        return [({"type": "text", "text": value}, path)]
    if type(value) is not list:
        raise wrong_type(value, path, "a string or an array of blocks")
    found = [(block, f"{path}[{i}]") for i, block in enumerate(value)]
    for block, block_path in found:
        check_object(block, block_path)
        kind = required(block, "type", block_path, String())
        if kind not in types:
            taken = f"one of {', '.join(types)}" if len(types) > 1 else types[0]
            message = f"{block_path} is of type {shown(kind)}; it must be {taken}."
            if kind == "document":
                message = (
                    f"{block_path} is a document, and none are read here; send its text instead."
                )
            raise RequestError("unsupported_content", message, f"{block_path}.type")
    return found


def _texts(value: Any, path: str) -> list[str]:
    """The texts of a content that can be nothing but text."""
    return [_text(block, place) for block, place in _blocks(value, path, _TAKEN["system"])]


def _text(block: dict[str, Any], path: str) -> str:
    return str(required(block, "text", path, String()))
