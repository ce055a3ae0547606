"""POST /api/chat and /api/generate, Ollama's API: turns bodies into requests.

A body is rewritten as a body of /v1/chat/completions or /v1/completions, and then read by that
route's code. `answers.py` renders the events.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.protocols.dialect import Dialect, ErrorFormat
from headrace.protocols.fields import samplers
from headrace.protocols.fields.common import COMMON, ignored, read_known
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
from headrace.protocols.framing import LINES, Framing
from headrace.protocols.ollama import answers
from headrace.protocols.ollama.answers import OllamaBody, OllamaFrames
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import completions as openai_completions
from headrace.streams.record import Record
from headrace.text.text_model import TextModel
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Prompt, Request, Route

# The maximum number of calls in one message.
_MAX_CALLS = 128
_PASSED = (
    *("stream", "attach", "heartbeat", "sse_ping_interval", "return_progress", "return_ingestion"),
    *("cache_prompt", "cache_salt", "guess", "priority"),
)
"""Headrace's fields that every generation route accepts. They do not change the answer's text."""

_IMAGES = Array(String(1), MAX_IMAGES)


class ReadOptions(NamedTuple):
    """Options in chat's format, and the paths of the options that have no effect."""

    fields: dict[str, Any]
    skipped: tuple[str, ...]


class ModelOptions(msgspec.Struct, frozen=True):
    """Reads the object `options`. Options that configure the server are reported as ignored."""

    def check(self, value: Any, path: str) -> ReadOptions:
        check_object(value, path)
        options = read_fields(_OPTIONS, value, f"{path}.")
        # Chat checks the values again, so pass the values as they were sent.
        fields = {_IN_CHAT.get(name, name): value[name] for name in options}
        if options.get("num_predict", 1) < 1:
            fields["max_tokens"] = -1
        others = {f"{path}.{name}": it for name, it in value.items() if name not in _OPTIONS}
        unused = samplers.without_effect(_OPTIONS, value)
        return ReadOptions(fields, (*ignored({}, others), *(f"{path}.{name}" for name in unused)))

    def schema(self) -> dict[str, Any]:
        return Object(_OPTIONS).schema()


_OPTIONS: Mapping[str, Kind] = {
    # 0 or less means no limit.
    "num_predict": Integer(low=-2),
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
    """Reads "json" or a JSON Schema as chat's response_format; "" and {} ask for nothing."""

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
    """Reads `think`: whether the model reasons before it answers, and with which effort."""

    def check(self, value: Any, path: str) -> dict[str, Any]:
        if type(value) is str:
            if value not in _EFFORTS:
                raise wrong_value(value, path, f"true, false, {', '.join(_EFFORTS)}")
            is_on = {"enable_thinking": True}
            return {"reasoning_effort": _EFFORTS[value], "chat_template_kwargs": is_on}
        return {"chat_template_kwargs": {"enable_thinking": Flag().check(value, path)}}

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [Flag().schema(), {"enum": list(_EFFORTS)}]}


_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}
"""Maps the efforts that Ollama's clients send to efforts that chat templates have."""


class KeepAlive(msgspec.Struct, frozen=True):
    """Reads how long a model stays in memory, in seconds or as a Go duration.

    Returns True if this time is zero, which asks to unload the model.
    """

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

_FIELDS: Mapping[str, Kind] = {
    "model": String(1),
    "keep_alive": KeepAlive(),
    "format": AnswerFormat(),
    "think": Think(),
    "options": ModelOptions(),
    "logprobs": Flag(),
    "top_logprobs": Integer(0, 20),
    **{name: COMMON[name] for name in _PASSED},
}


class ChatTurns(msgspec.Struct, frozen=True):
    """Reads the field `messages` as chat's messages."""

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
    "images": _IMAGES,
    "tool_calls": Array(Object(), _MAX_CALLS),
    "tool_name": String(),
    "tool_call_id": String(),
}


class _MessageReader:
    """Reads messages one by one. If a tool result names no call, finds the call of that result."""

    def __init__(self) -> None:
        self._num_calls = 0
        # Names and ids of the calls that have no result yet.
        self._open: list[tuple[str, str]] = []

    def message(self, value: Any, path: str) -> dict[str, Any]:
        check_object(value, path)
        role = required(value, "role", path, String())
        fields = read_fields(_MESSAGE, value, f"{path}.")
        text = fields.get("content", "")
        message = {"role": role, "content": _with_images(text, fields, f"{path}.")}
        if "thinking" in fields:
            message["reasoning_content"] = fields["thinking"]
        if calls := fields.get("tool_calls"):
            placed = ((call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls))
            message["tool_calls"] = [self._call(*each) for each in placed]
        return message | self._result_of(fields) if role == "tool" else message

    def _call(self, call: dict[str, Any], path: str) -> dict[str, Any]:
        function = required(call, "function", path, Object())
        name = required(function, "name", f"{path}.function", String(1))
        arguments = Object().check(function.get("arguments") or {}, f"{path}.function.arguments")
        call_id = String().check(call.get("id") or f"call_{self._num_calls}", f"{path}.id")
        self._num_calls += 1
        self._open.append((name, call_id))
        shown = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": shown}

    def _result_of(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the name and id of a result's call: the first matching call without a result."""
        name, call_id = fields.get("tool_name"), fields.get("tool_call_id")
        fitting = [it for it in self._open if name in (None, it[0]) and call_id in (None, it[1])]
        if fitting:
            self._open.remove(fitting[0])
            name, call_id = fitting[0]
        named = {"name": name, "tool_call_id": call_id}
        return {key: item for key, item in named.items() if item is not None}


def _with_images(text: str, fields: Mapping[str, Any], prefix: str = "") -> str | list[Any]:
    """Return the content of a message: the text followed by `images`, which are base64."""
    if not fields.get("images"):
        return text
    placed = ((_uri(data), f"{prefix}images[{i}]") for i, data in enumerate(fields["images"]))
    return [{"type": "text", "text": text}, *(PlacedImage(*each) for each in placed)]


def _uri(data: str) -> str:
    return data if data.startswith("data:") else f"data:image/png;base64,{data}"


class _OllamaDialect:
    """The common parts of /api/chat and /api/generate."""

    REQUIRED: tuple[str, ...] = ("model",)
    ERRORS: ErrorFormat = answers.ERRORS
    FRAMING: Framing = LINES
    shape: answers.Shape

    def frames(self, record: Record) -> OllamaFrames:
        return OllamaFrames(record, self.shape)

    def response_body(self, record: Record) -> OllamaBody:
        return OllamaBody(record, self.shape)


class OllamaChat(_OllamaDialect):
    """POST /api/chat: answers a conversation."""

    ROUTE: Route = "/api/chat"
    SUMMARY = "Answer a conversation, as Ollama does"
    ID_PREFIX = "ollamachat-"
    TABLE: Mapping[str, Kind] = {
        **_FIELDS,
        "messages": ChatTurns(),
        "tools": openai_chat.TABLE["tools"],
    }
    KEYS: tuple[str, ...] = ("model", "created_at", "message", "done", "done_reason")
    IN_PROMPTS = openai_chat.IN_PROMPTS
    shape = staticmethod(answers.as_message)

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body's fields in chat's format, after every check that needs no model."""
        own = read_known(self.TABLE, self.REQUIRED, body)
        if "tools" in own:
            # Chat checks the tools again, so pass the tools as they were sent.
            own["tools"] = body["tools"]
        messages = own.get("messages", [])
        return _finished(openai_chat.read(_to_chat(own, messages)), own, bool(messages))

    def to_prompts(self, fields: dict[str, Any]) -> tuple[Prompt, ...]:
        return openai_chat.to_prompts(fields)

    def to_request(
        self, fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel
    ) -> Request:
        return openai_chat.to_request(fields, prompts, model)


class OllamaGenerate(_OllamaDialect):
    """POST /api/generate: answers one question, or continues a text (`raw` or `suffix`)."""

    ROUTE: Route = "/api/generate"
    SUMMARY = "Answer a question or continue a text, as Ollama does"
    ID_PREFIX = "ollamagen-"
    TABLE: Mapping[str, Kind] = {
        **_FIELDS,
        "prompt": String(),
        "suffix": String(),
        "system": String(),
        "images": _IMAGES,
        "raw": Flag(),
    }
    KEYS: tuple[str, ...] = ("model", "created_at", "response", "done", "done_reason")
    IN_PROMPTS = openai_chat.IN_PROMPTS | openai_completions.IN_PROMPTS
    shape = staticmethod(answers.as_response)

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """Check the body without a model; return it as fields of OpenAI's chat or completions."""
        own = read_known(self.TABLE, self.REQUIRED, body)
        prompt = own.get("prompt", "")
        if prompt and (own.get("raw") or own.get("suffix")):
            return _finished(openai_completions.read(_to_text(own)), own, True)
        question: dict[str, Any] = {"role": "user", "content": _with_images(prompt, own)}
        system = {"role": "system", "content": own.get("system")}
        messages = [*[system] * bool(own.get("system")), question] if prompt else []
        return _finished(openai_chat.read(_to_chat(own, messages)), own, bool(prompt))

    def to_prompts(self, fields: dict[str, Any]) -> tuple[Prompt, ...]:
        is_text = "prompt" in fields
        return openai_completions.to_prompts(fields) if is_text else openai_chat.to_prompts(fields)

    def to_request(
        self, fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel
    ) -> Request:
        """Make the same request as the chat or completions route."""
        is_chat = isinstance(prompts[0], Chat)
        make = openai_chat.to_request if is_chat else openai_completions.to_request
        return make(fields, prompts, model)


def _to_common(own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the fields that both Ollama routes have to the names of OpenAI's routes."""
    options: ReadOptions = own.get("options", ReadOptions({}, ()))
    return {
        "model": own["model"],
        "response_format": own.get("format"),
        **options.fields,
        **{name: own[name] for name in _PASSED if name in own},
        "stream": own.get("stream", True),
    }


def _to_chat(own: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Translate a body to a chat body; without messages, the request only loads the model."""
    last = messages[-1] if messages else {}
    starts_answer = last.get("role") == "assistant" and "tool_calls" not in last
    chat_only = {name: own[name] for name in ("logprobs", "top_logprobs", "tools") if name in own}
    turns = messages or [{"role": "user", "content": ""}]
    more = {"messages": turns, "continue_final_message": starts_answer}
    think: dict[str, Any] = own.get("think", {})
    return _to_common(own) | think | chat_only | more


def _finished(fields: dict[str, Any], own: Mapping[str, Any], is_asked: bool) -> dict[str, Any]:
    """Extend `fields`, which OpenAI's code has read, by the fields that only Ollama's API has.

    A request without a prompt loads the model: the request processes an empty prompt and samples no
    token. With `keep_alive: 0`, a request without a prompt unloads the model instead. In all other
    requests, keep_alive has no effect.
    """
    skipped: tuple[str, ...] = own["options"].skipped if "options" in own else ()
    if not is_asked:
        fields["max_tokens"] = 0
        fields["unloads"] = own.get("keep_alive", False)
    if "keep_alive" in own and not fields.get("unloads"):
        skipped += ("keep_alive",)
    return fields | {"skipped": skipped}


def _to_text(own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a body to a body of /v1/completions.

    Raise RequestError for a field that only chats may have.
    """
    for name in _CHAT_ONLY:
        if own.get(name) and own[name] != _NO_THINKING:
            message = (
                f"{name} only applies to chats, but raw or suffix continues a plain text. "
                f"Leave out {name}, or leave out raw and suffix."
            )
            raise RequestError("invalid_value", message, name)
    logprobs = own.get("top_logprobs", 0) if own.get("logprobs") else None
    texts = {"prompt": own["prompt"], "suffix": own.get("suffix"), "logprobs": logprobs}
    return {"max_tokens": -1} | _to_common(own) | texts


_CHAT_ONLY = ("system", "images", "think")
_NO_THINKING = Think().check(False, "think")

CHAT: Dialect = OllamaChat()
GENERATE: Dialect = OllamaGenerate()
