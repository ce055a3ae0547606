"""POST /v1/messages, as Anthropic's API: read as a chat, shown as content blocks."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols.anthropic.errors import AnthropicErrors
from headrace.protocols.anthropic.input import (
    ClientTools,
    NotServed,
    OutputFormat,
    ReadTools,
    Thinking,
    ToolUse,
    ToolUseChoice,
)
from headrace.protocols.anthropic.turns import ReadTurns, SystemPrompt, Turns
from headrace.protocols.blocks import Block, Blocks
from headrace.protocols.dialect import PING, ErrorFormat, encode, named
from headrace.protocols.fields.common import COMMON, UNSUPPORTED, Stops, check_required
from headrace.protocols.fields.kinds import Integer, Kind, Object, String, read_fields
from headrace.protocols.fields.messages import refuse_images
from headrace.protocols.fields.tools import arguments_of
from headrace.protocols.framing import SSE
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai.chunks import ingestion_of, progress_of, queue_of, wait_of
from headrace.protocols.progress_words import ProgressWords
from headrace.streams.events import (
    Accepted,
    AnyEvent,
    ChoiceEnd,
    Error,
    Finish,
    Heartbeat,
    Progress,
    Queued,
    Tokens,
    Usage,
)
from headrace.streams.record import Record
from headrace.streams.tally import Tally
from headrace.text.text_model import TextModel
from headrace_common.answer import Run, call_id, runs
from headrace_common.errors import RequestError
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece
from headrace_common.request import Prompt, Request, Route

ROUTE: Route = "/v1/messages"
SUMMARY = "Answer a conversation, as Anthropic's API"
ID_PREFIX = "msg_"
COUNTED_REQUIRED = ("model", "messages")
REQUIRED: tuple[str, ...] = (*COUNTED_REQUIRED, "max_tokens")
KEYS = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
ERRORS: ErrorFormat = AnthropicErrors()
FRAMING = SSE
IN_PROMPTS = openai_chat.IN_PROMPTS
to_prompts = openai_chat.to_prompts

_NOT_HERE = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stop"),
    *("include_stop_str_in_output", "stream_options", "timings_per_token", "return_token_ids"),
    "response_format",
)
_AS_IN_CHAT: Mapping[str, Kind] = {
    **{name: kind for name, kind in COMMON.items() if name not in _NOT_HERE},
}
_OWN: Mapping[str, Kind] = {
    "thread": NotServed(),  # the first: then a client sends the messages that it had left out
    "model": String(1),
    "messages": Turns(),
    "system": SystemPrompt(),
    "tools": ClientTools(),
    "tool_choice": ToolUseChoice(),
    "thinking": Thinking(),
    "stop_sequences": Stops(),
    "output_config": Object({"format": OutputFormat(), "effort": String()}),
    "output_format": OutputFormat(),
    "cache_control": Object(),
    "chat_template_kwargs": Object(),
}
COUNTED: Mapping[str, Kind] = {k: v for k, v in _OWN.items() if k != "stop_sequences"}
TABLE: Mapping[str, Kind] = {**_AS_IN_CHAT, **_OWN, "max_tokens": Integer(0)}
_MOST_EFFORT = ("xhigh", "max")  # templates know high at most


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields as chat's, checked as far as they need no model."""
    check_required(REQUIRED, body)
    most = TABLE["max_tokens"].check(body["max_tokens"], "max_tokens")
    passed = {name: body[name] for name in (*_AS_IN_CHAT, *UNSUPPORTED) if name in body}
    own = read_fields(_OWN, body)
    fields = openai_chat.read(passed | _to_chat(own)) | {"max_tokens": most}
    tools = own.get("tools", ReadTools())
    return fields | {"tool_paths": tools.paths, "skipped": _skipped(own)}


def read_counted(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that make the prompt; a limit and what else an answer needs may be missing."""
    check_required(COUNTED_REQUIRED, body)
    own = read_fields(_OWN, body)
    fields = openai_chat.read(_to_chat(own)) | {"skipped": _skipped(own)}
    refuse_images(fields["messages"], "this route counts text only")
    return fields


def _skipped(own: dict[str, Any]) -> tuple[str, ...]:
    """Return the paths of the blocks and tools that the model is not shown."""
    system, tools = own.get("system", ReadTurns()), own.get("tools", ReadTools())
    return tuple(system.skipped + own["messages"].skipped + tools.skipped)


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """The request that chat would make of the same fields."""
    request = openai_chat.to_request(fields, prompts, model)
    return msgspec.structs.replace(request, route=ROUTE)


def _to_chat(own: dict[str, Any]) -> dict[str, Any]:
    """The checked fields as a body of chat's, which checks what is the same in both."""
    config, choice = own.get("output_config", {}), own.get("tool_choice", ToolUse())
    kwargs = {"enable_thinking": own["thinking"]} if "thinking" in own else {}
    system, messages = own.get("system", ReadTurns()).messages, own["messages"].messages
    is_begun = _is_begun(messages)
    effort = config.get("effort")
    tools = own.get("tools", ReadTools())
    _check_choice(choice.wanted, tools)
    return {
        "model": own["model"],
        "messages": system + messages,
        "continue_final_message": is_begun,
        "tools": tools.functions,
        "tool_choice": choice.wanted,
        "parallel_tool_calls": choice.is_parallel,
        "stop": list(own.get("stop_sequences", ())),
        "reasoning_effort": "high" if effort in _MOST_EFFORT else effort,
        "response_format": own.get("output_format") or config.get("format"),
        "chat_template_kwargs": kwargs | own.get("chat_template_kwargs", {}),
    }


def _check_choice(wanted: str | dict[str, Any], tools: ReadTools) -> None:
    """RequestError if a tool has to be called and this server can offer none, or not that one."""
    if wanted == "required" and not tools.functions:
        reason = "this server can run none of the tools" if tools.skipped else "there are no tools"
        message = f"tool_choice is any, and {reason}; send tools that you run, or auto."
        raise RequestError("invalid_value", message, "tool_choice")
    name = wanted["function"]["name"] if isinstance(wanted, dict) else None
    if name in tools.skipped_names:
        message = f"tool_choice names {name}, which only its provider's servers run. Choose a tool "
        message += "that you run, or auto."
        raise RequestError("unsupported_parameter", message, "tool_choice.name")


def _is_begun(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer. Takes an empty one away."""
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        return False
    if not last["content"] and len(messages) > 1:
        messages.pop()
        return False
    return True


_DELTAS: Mapping[str, tuple[str, str]] = {
    CONTENT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    TOOL: ("input_json_delta", "partial_json"),
}
_NO_TEXT = ChannelPiece("")


class MessageFrames:
    """The SSE frames of one stream: owns their order."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._options = record.request.response_options
        self._tally = Tally()
        self._is_open = False
        self._blocks: Blocks[bytes] = Blocks(self)
        self._words = ProgressWords(record)
        self._progress: dict[str, Any] = {}  # that signs of life carry, while the prompt is read

    def render(self, event: AnyEvent) -> list[bytes]:
        """The frames of one event: none, one or several."""
        if not self._is_open:  # the first frame alone has figures
            self._tally.feed(event)
        match event:
            case Accepted():
                return self._open() if self._options.heartbeat else []
            case Queued():
                return self._report(queue=queue_of(event))
            case Progress():
                return self._advance(event)
            case Heartbeat():
                return self._heartbeat(event)
            case Tokens():
                self._progress = {}
                return self._tokens(event)
            case Finish():
                return self._open() + self._finish(event)
            case Error():
                return [ERRORS.frame(event)]
        return []

    def idle(self) -> bytes:
        """A heartbeat. Before its first event a stream has no place for one."""
        return _event("ping") if self._is_open else PING

    def _open(self) -> list[bytes]:
        if self._is_open:
            return []
        self._is_open = True
        message = _message(self._record, [], (None, None), self._tally.usage)
        return [_event("message_start", message=message)]

    def _report(self, **figures: dict[str, Any]) -> list[bytes]:
        return [*self._open(), _event("ping", **figures)] if self._options.return_progress else []

    def _advance(self, event: Progress) -> list[bytes]:
        frames = self._report(prompt_progress=progress_of(event))
        if frames and self._record.rendering > 1:
            self._progress = {"prompt_progress": progress_of(event)}
        if line := self._words.take(event):
            frames += self._blocks.feed(ChannelPiece(line, REASONING))
        return frames

    def _heartbeat(self, event: Heartbeat) -> list[bytes]:
        if not self._options.heartbeat:
            return []
        if event.form == "sign":
            return self._sign()
        told = wait_of(event) if self._options.return_progress else {}
        return self._report(**told) if told else [self.idle()]

    def _sign(self) -> list[bytes]:
        """A sign of life for clients that pass over pings: an empty delta of the open block.

        Before any block it opens one of text, in which the answer's text goes on.
        """
        blocks = self._blocks
        if blocks.open is None and (blocks.num_opened or self._record.rendering == 0):
            return [self.idle()]
        begun = [] if blocks.open else blocks.begin(_NO_TEXT)
        assert blocks.open is not None
        return [*self._open(), *begun, _delta(blocks.open, "", **self._progress)]

    def _tokens(self, event: Tokens) -> list[bytes]:
        frames = [frame for run in runs(event.pieces) for frame in self._blocks.feed(run)]
        if event.end:
            frames += self._blocks.close()
        return self._open() + frames if frames else []

    def opened(self, block: Block) -> list[bytes]:
        shown = _block(self._record, block)
        return [_event("content_block_start", index=block.number, content_block=shown)]

    def grown(self, block: Block, text: str) -> list[bytes]:
        return [_delta(block, text)]

    def closed(self, block: Block) -> list[bytes]:
        is_signed = block.channel == REASONING
        signature = {"type": "signature_delta", "signature": ""}
        frames = [_changed(block, signature)] * is_signed
        return [*frames, _event("content_block_stop", index=block.number)]

    def _finish(self, event: Finish) -> list[bytes]:
        reason, sequence = _stop(event.ends[0], event.usage, self._record.request)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage(event.usage)
        stop = _event("message_stop", **ingestion_of(event))
        return [_event("message_delta", delta=delta, usage=usage), stop]


class MessageBody:
    """The whole answer of one stream."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._pieces: list[ChannelPiece] = []
        self._finish: Finish | None = None

    def feed(self, event: AnyEvent) -> None:
        match event:
            case Tokens():
                self._pieces += event.pieces
            case Finish():
                self._finish = event

    def whole(self) -> dict[str, Any]:
        assert self._finish, "an answer is asked for before its end"
        usage, request = self._finish.usage, self._record.request
        content = [self._filled(run) for run in runs(self._pieces)]
        stop = _stop(self._finish.ends[0], usage, request)
        return _message(self._record, content, stop, usage) | ingestion_of(self._finish)

    def _filled(self, run: Run) -> dict[str, Any]:
        block = _block(self._record, run)
        if run.channel == TOOL:
            return block | {"input": arguments_of(run.text)}
        return block | {_DELTAS[run.channel][1]: run.text}


frames, response_body = MessageFrames, MessageBody


def _event(kind: str, **more: Any) -> bytes:
    return named(kind, encode({"type": kind, **more}))


def _delta(block: Block, text: str, **more: Any) -> bytes:
    kind, key = _DELTAS[block.channel]
    return _changed(block, {"type": kind, key: text}, **more)


def _changed(block: Block, delta: dict[str, str], **more: Any) -> bytes:
    return _event("content_block_delta", index=block.number, delta=delta, **more)


def _block(record: Record, block: Block | Run) -> dict[str, Any]:
    """A content block as it begins."""
    if block.channel == TOOL:
        tool_id = call_id(record.id, 0, block.call, "toolu_")
        return {"type": "tool_use", "id": tool_id, "name": block.name, "input": {}}
    if block.channel == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _message(
    record: Record, content: list[Any], stop: tuple[str | None, str | None], usage: Usage
) -> dict[str, Any]:
    return {
        "id": record.id,
        "type": "message",
        "role": "assistant",
        "model": record.request.shown_model,
        "content": content,
        "stop_reason": stop[0],
        "stop_sequence": stop[1],
        "usage": _usage(usage),
    }


def _stop(end: ChoiceEnd, usage: Usage, request: Request) -> tuple[str, str | None]:
    """stop_reason and stop_sequence."""
    if end.finish_reason == "length":
        is_limit = usage.completion_tokens == request.sampling.max_tokens
        return ("max_tokens" if is_limit else "model_context_window_exceeded"), None
    if end.finish_reason == "tool_calls":
        return "tool_use", None
    if isinstance(end.stop_reason, str):
        return "stop_sequence", end.stop_reason
    return "end_turn", None


def _usage(usage: Usage) -> dict[str, Any]:
    """Prompt tokens from the cache are counted apart; nobody pays for writing it."""
    shown: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }
    if usage.reasoning_tokens:
        shown["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return shown
