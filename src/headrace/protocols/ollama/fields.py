"""Bodies of Ollama's clients, checked and written as chat's fields; knows no events."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.protocols.fields import samplers
from headrace.protocols.fields.common import COMMON, ignored
from headrace.protocols.fields.kinds import (
    Array,
    Flag,
    Integer,
    Kind,
    Object,
    String,
    check_object,
    items_of,
    nullable,
    read_fields,
    required,
    wrong_value,
)
from headrace.protocols.fields.messages import MAX_IMAGES, MAX_MESSAGES, PlacedImage

_MAX_CALLS = 128  # in one message
_PASSED = (
    *("stream", "attach", "heartbeat", "sse_ping_interval", "return_progress", "return_ingestion"),
    *("cache_prompt", "cache_salt", "guess", "priority"),
)
"""Fields of all our routes that shape no answer: they stand beside Ollama's own."""

IMAGES = Array(String(1), MAX_IMAGES)


class ReadOptions(NamedTuple):
    """Chat's fields, and the paths of options that have no effect."""

    fields: dict[str, Any]
    skipped: tuple[str, ...]


class ModelOptions(msgspec.Struct, frozen=True):
    """The object `options`. Of what shapes the server, not the answer, the client is told."""

    def check(self, value: Any, path: str) -> ReadOptions:
        check_object(value, path)
        given = read_fields(_OPTIONS, value, f"{path}.")
        # chat reads them again, so as they were sent
        fields = {_IN_CHAT.get(name, name): value[name] for name in given}
        if given.get("num_predict", 1) < 1:
            fields["max_tokens"] = -1
        others = {f"{path}.{name}": it for name, it in value.items() if name not in _OPTIONS}
        asked = samplers.without_effect(_OPTIONS, value)
        return ReadOptions(fields, (*ignored({}, others), *(f"{path}.{name}" for name in asked)))

    def schema(self) -> dict[str, Any]:
        return Object(_OPTIONS).schema()


_OPTIONS: Mapping[str, Kind] = {
    "num_predict": Integer(low=-2),  # 0 or less: no limit
    **samplers.FIELDS,
    **{
        name: COMMON[name]
        for name in (
            *("seed", "temperature", "top_k", "top_p", "min_p"),
            *("presence_penalty", "frequency_penalty", "repeat_penalty", "stop"),
        )
    },
}
_IN_CHAT = {"num_predict": "max_tokens"}


class AnswerFormat(msgspec.Struct, frozen=True):
    """ "json", or a JSON schema, as chat's response_format; nothing asks for nothing."""

    def check(self, value: Any, path: str) -> dict[str, Any] | None:
        if value in ("", {}):
            return None
        if value == "json":
            return {"type": "json_object"}
        if type(value) is str:
            raise wrong_value(value, path, '"json" or a JSON schema')
        return {"type": "json_schema", "json_schema": {"schema": Object().check(value, path)}}

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}


class Think(msgspec.Struct, frozen=True):
    """Whether the model reasons first, or how much, as chat's fields."""

    def check(self, value: Any, path: str) -> dict[str, Any]:
        if type(value) is str:
            if value not in _EFFORTS:
                raise wrong_value(value, path, f"true, false, {', '.join(_EFFORTS)}")
            is_on = {"enable_thinking": True}
            return {"reasoning_effort": value, "chat_template_kwargs": is_on}
        return {"chat_template_kwargs": {"enable_thinking": Flag().check(value, path)}}

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [Flag().schema(), {"enum": list(_EFFORTS)}]}


_EFFORTS = ("low", "medium", "high")


class KeepAlive(msgspec.Struct, frozen=True):
    """How long a model stays in memory, in seconds or as Go writes durations; True for no time."""

    def check(self, value: Any, path: str) -> bool:
        if type(value) in (int, float):
            return bool(value == 0)
        if type(value) is not str or not _DURATION.fullmatch(value):
            raise wrong_value(value, path, 'a number of seconds or a duration such as "5m"')
        return not re.search("[1-9]", value)

    def schema(self) -> dict[str, Any]:
        duration = {"type": "string", "pattern": f"^({_DURATION.pattern})$"}
        return {"anyOf": [{"type": "number"}, duration]}


_DURATION = re.compile(r"[+-]?([0-9]+|(([0-9]+(\.[0-9]+)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)")

FIELDS: Mapping[str, Kind] = {
    "model": String(1),
    "keep_alive": KeepAlive(),
    "format": AnswerFormat(),
    "think": Think(),
    "options": ModelOptions(),
    "logprobs": Flag(),
    "top_logprobs": Integer(0, 20),
    **{name: COMMON[name] for name in _PASSED},
}


def to_common(own: Mapping[str, Any]) -> dict[str, Any]:
    """The read fields of FIELDS as a body of ours has them, whether it is a chat or a text."""
    options: ReadOptions = own.get("options", ReadOptions({}, ()))
    return {
        "model": own["model"],
        "response_format": own.get("format"),
        **options.fields,
        **{name: own[name] for name in _PASSED if name in own},
        "stream": own.get("stream", True),
    }


def to_chat(own: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The same as a body of chat with these messages, without any of which nothing is drawn."""
    last = messages[-1] if messages else {}
    is_begun = last.get("role") == "assistant" and "tool_calls" not in last
    asked = {name: own[name] for name in ("logprobs", "top_logprobs", "tools") if name in own}
    turns = messages or [{"role": "user", "content": ""}]
    more = {"messages": turns, "continue_final_message": is_begun}
    think: dict[str, Any] = own.get("think", {})
    return to_common(own) | think | asked | more


def finished(fields: dict[str, Any], own: Mapping[str, Any], is_asked: bool) -> dict[str, Any]:
    """Fields as another dialect read them: with what it cannot say.

    A request that asks nothing loads the model: it computes a prompt and draws no token. With
    `keep_alive: 0` it unloads the model instead. Otherwise keep_alive has no effect.
    """
    skipped: tuple[str, ...] = own["options"].skipped if "options" in own else ()
    if not is_asked:
        fields["max_tokens"] = 0
        fields["unloads"] = own.get("keep_alive", False)
    if "keep_alive" in own and not fields.get("unloads"):
        skipped += ("keep_alive",)
    return fields | {"skipped": skipped}


class ChatTurns(msgspec.Struct, frozen=True):
    """The field `messages`, as chat's."""

    def check(self, value: Any, path: str) -> list[dict[str, Any]]:
        reading = _MessageReader()
        return [reading.message(*each) for each in items_of(value, path, 0, MAX_MESSAGES)]

    def schema(self) -> dict[str, Any]:
        message = {
            "type": "object",
            "properties": {"role": {"type": "string"}}
            | {name: nullable(kind) for name, kind in _MESSAGE.items()},
            "required": ["role"],
        }
        return {"type": "array", "items": message, "maxItems": MAX_MESSAGES}


_MESSAGE: Mapping[str, Kind] = {
    "content": String(),
    "thinking": String(),
    "images": IMAGES,
    "tool_calls": Array(Object(), _MAX_CALLS),
    "tool_name": String(),
    "tool_call_id": String(),
}


class _MessageReader:
    """Reads one message after the other. Results of calls need not name their call: it is found."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []  # names and ids of calls without a result

    def message(self, value: Any, path: str) -> dict[str, Any]:
        check_object(value, path)
        role = required(value, "role", path, String())
        given = read_fields(_MESSAGE, value, f"{path}.")
        text = given.get("content", "")
        message = {"role": role, "content": with_images(text, given, f"{path}.")}
        if "thinking" in given:
            message["reasoning_content"] = given["thinking"]
        if calls := given.get("tool_calls"):
            placed = ((call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls))
            message["tool_calls"] = [self._call(*each) for each in placed]
        return message | self._result_of(given) if role == "tool" else message

    def _call(self, call: dict[str, Any], path: str) -> dict[str, Any]:
        function = required(call, "function", path, Object())
        name = required(function, "name", f"{path}.function", String(1))
        arguments = Object().check(function.get("arguments") or {}, f"{path}.function.arguments")
        call_id = String().check(call.get("id") or f"call_{self._num_calls}", f"{path}.id")
        self._num_calls += 1
        self._open.append((name, call_id))
        shown = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": shown}

    def _result_of(self, given: dict[str, Any]) -> dict[str, Any]:
        """The name and id of the call that this result belongs to: the first that fits."""
        name, call_id = given.get("tool_name"), given.get("tool_call_id")
        fitting = [it for it in self._open if name in (None, it[0]) and call_id in (None, it[1])]
        if fitting:
            self._open.remove(fitting[0])
            name, call_id = fitting[0]
        named = {"name": name, "tool_call_id": call_id}
        return {key: item for key, item in named.items() if item is not None}


def with_images(text: str, given: Mapping[str, Any], prefix: str = "") -> str | list[Any]:
    """The content of what has `images`, which are base64, behind its text."""
    if not given.get("images"):
        return text
    placed = ((_uri(data), f"{prefix}images[{i}]") for i, data in enumerate(given["images"]))
    return [{"type": "text", "text": text}, *(PlacedImage(*each) for each in placed)]


def _uri(data: str) -> str:
    return data if data.startswith("data:") else f"data:image/png;base64,{data}"
