"""POST /v1/chat/completions: turns bodies into requests, and events into chunks or an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.protocols import requests
from headrace.protocols.fields.client_tools import OfferedTools
from headrace.protocols.fields.common import COMMON, read_common
from headrace.protocols.fields.kinds import Flag, Integer, Kind, Object, String
from headrace.protocols.fields.messages import Messages, take_images
from headrace.protocols.fields.tools import (
    ToolChoice,
    Tools,
    check_choice,
    narrow,
    types_of,
)
from headrace.protocols.framing import SSE
from headrace.protocols.openai import chunks as openai
from headrace.protocols.openai.chunks import Choice, ChunkBody, ChunkFrames, Part
from headrace.protocols.openai.custom_calls import CallDeltas
from headrace.protocols.progress_text import ProgressWords
from headrace.streams.events import ChoiceEnd, TokenLogprob
from headrace.streams.record import Record
from headrace.text.text_model import TextModel
from headrace_common.errors import RequestError
from headrace_common.pieces import ChannelPiece
from headrace_common.request import Channels, Chat, Prompt, Request, Route

ROUTE: Route = "/v1/chat/completions"
SUMMARY = "Answer a conversation"
ID_PREFIX = "chatcmpl-"
REQUIRED: tuple[str, ...] = ("messages",)
TEMPLATE: Mapping[str, Kind] = {
    "messages": Messages(),
    "add_generation_prompt": Flag(),
    "continue_final_message": Flag(),
    "chat_template_kwargs": Object(),
    "reasoning_effort": String(),
    "tools": Tools(),
    "tool_choice": ToolChoice(),
}
TABLE: Mapping[str, Kind] = {
    **TEMPLATE,
    **COMMON,
    "logprobs": Flag(),
    "top_logprobs": Integer(0, 20),
}
IN_PROMPTS = frozenset(TEMPLATE) - {"tool_choice"}
_MAX_SKIPPED = 16
_NOT_REPLACEABLE = ("messages", "tools", "add_generation_prompt")

KEYS = openai.KEYS
ERRORS = openai.ERRORS
FRAMING = SSE


def read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a body sets, after every check that needs no model."""
    fields = read_common(TABLE, REQUIRED, body)
    check_template_fields(fields)
    tools = fields.get("tools", OfferedTools())
    fields["tool_paths"] = [it.path for it in tools.found]
    fields["tool_kinds"] = tools.kinds
    tools.refuse_forced(fields.get("tool_choice"))
    narrow(fields)
    check_choice(fields)
    fields["skipped"] = (*tools.skipped, *fields["messages"].skipped)[:_MAX_SKIPPED]
    fields["one_call"] = body.get("parallel_tool_calls") is False
    fields["parameter_types"] = types_of(fields.get("tools", ()))
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        message = "top_logprobs needs logprobs: true; send both, or neither."
        raise RequestError("invalid_value", message, "top_logprobs")
    return fields


def to_prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    return (to_chat(fields),)


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """Make the request with the model's defaults. Raise RequestError if a limit is exceeded."""
    num_logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    request = requests.make_request(ROUTE, prompts, fields, model, num_logprobs)
    has_tools = offers_tools(fields)
    if not (has_tools or model.reasoning_format):
        return request
    tools = model.tool_format if has_tools else ""
    types = fields["parameter_types"] if tools else {}
    custom = tuple(fields.get("tool_kinds", ()))
    channels = Channels(tools, model.reasoning_format, types, custom)
    return msgspec.structs.replace(request, channels=channels)


def offers_tools(fields: Mapping[str, Any]) -> bool:
    """Whether a request with these checked fields lets the model call tools."""
    return bool(fields.get("parameter_types")) and fields.get("tool_choice") != "none"


def read_chat(fields: dict[str, Any]) -> Chat:
    """Return the chat of a request that only renders the template."""
    check_template_fields(fields)
    narrow(fields)
    return to_chat(fields)


def prefill(fields: dict[str, Any]) -> None:
    """Let the answer continue an assistant message at the end, unless the body decides."""
    last = fields["messages"][-1]
    is_decided = not fields.keys().isdisjoint(("continue_final_message", "add_generation_prompt"))
    if last["role"] == "assistant" and not last.get("tool_calls") and not is_decided:
        fields["continue_final_message"] = True


def to_chat(fields: dict[str, Any]) -> Chat:
    effort: dict[str, Any] = {k: fields[k] for k in ("reasoning_effort",) if k in fields}
    if effort.get("reasoning_effort") == "none":
        effort["enable_thinking"] = False
    is_called = fields.get("tool_choice") != "none"
    continues = fields.get("continue_final_message", False)
    return Chat(
        tools=fields.get("tools", ()) if is_called else (),
        template_kwargs=effort | fields.get("chat_template_kwargs", {}),
        add_generation_prompt=fields.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        **take_images(fields["messages"])._asdict(),
    )


def check_template_fields(fields: dict[str, Any]) -> None:
    for name in _NOT_REPLACEABLE:
        if name in fields.get("chat_template_kwargs", {}):
            path = f"chat_template_kwargs.{name}"
            message = f"The server sets {path} itself; leave it out."
            raise RequestError("invalid_value", message, path)
    if not fields.get("continue_final_message"):
        return
    if fields.get("add_generation_prompt"):
        message = "continue_final_message and add_generation_prompt exclude each other; send one."
        raise RequestError("invalid_value", message, "continue_final_message")
    role = fields["messages"][-1]["role"]
    if role != "assistant":
        raise RequestError(
            "invalid_value",
            f"continue_final_message needs an assistant message at the end, not a {role} message.",
            "continue_final_message",
        )


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_prompt_in_choice = False

    def __init__(self, record: Record) -> None:
        self._record = record
        self._has_logprobs = record.request.sampling.num_logprobs is not None
        # The tool calls by choice; choices without tool calls are missing.
        self._calls: dict[int, CallDeltas] = {}

    def opening(self) -> list[Choice]:
        """Return one chunk with the role for each choice."""
        role = {"role": "assistant", "content": ""}
        numbers = range(self._record.request.num_choices)
        return [{"index": i, "delta": role, "finish_reason": None} for i in numbers]

    def idle(self, index: int) -> Choice:
        return {"index": index, "delta": {}, "finish_reason": None}

    def part(self, index: int, part: Part) -> Choice:
        delta: dict[str, Any] = _reasoning(part.reasoning) if part.reasoning else {}
        if part.text:
            delta["content"] = part.text
        if part.calls:
            delta["tool_calls"] = self._calls_of(index).add(part.calls)
        shown: Choice = {"index": index, "delta": delta}
        if self._has_logprobs:
            shown["logprobs"] = _logprobs(part.logprobs)
        return shown | {"finish_reason": None}

    def end(self, index: int, end: ChoiceEnd) -> Choice:
        idle = self.idle(index)
        if index in self._calls and (rest := self._calls[index].end()):
            idle["delta"] = {"tool_calls": rest}
        return idle | {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}

    def whole(self, index: int, parts: Sequence[Part], end: ChoiceEnd) -> Choice:
        texts, reasonings, pieces = list[str](), list[str](), list[ChannelPiece]()
        for part in parts:
            texts.append(part.text)
            reasonings.append(part.reasoning)
            pieces += part.calls
        text, reasoning = "".join(texts), "".join(reasonings)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if pieces:
            calls = self._calls_of(index).whole(pieces)
            message["content"] = text or None
            message["tool_calls"] = [{k: v for k, v in it.items() if k != "index"} for it in calls]
        logprobs = None
        if self._has_logprobs:
            logprobs = _logprobs([entry for part in parts for entry in part.logprobs])
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }

    def _calls_of(self, index: int) -> CallDeltas:
        if index not in self._calls:
            channels = self._record.request.channels
            custom = channels.custom_tools if channels else ()
            self._calls[index] = CallDeltas((self._record.id, index), custom)
        return self._calls[index]


def _reasoning(text: str) -> dict[str, Any]:
    """Return the reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": openai.logprobs_of(entries), "refusal": None}


def frames(record: Record) -> ChunkFrames:
    return ChunkFrames(record, ChatShape(record), ProgressWords(record))


def response_body(record: Record) -> ChunkBody:
    return ChunkBody(record, ChatShape(record))
