"""POST /v1/messages, Anthropic's API: turns bodies into chats, and events into content blocks."""

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
from headrace.protocols.fields.common import COMMON, UNSUPPORTED, Stops, check_required, ignored
from headrace.protocols.fields.kinds import Integer, Kind, Object, String, read_fields, shown
from headrace.protocols.fields.messages import refuse_images
from headrace.protocols.fields.tools import arguments_of
from headrace.protocols.fields.unknown import header_of, unknown_within
from headrace.protocols.framing import SSE
from headrace.protocols.inserted_texts import remove_inserted
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai.chunks import ingestion_of, progress_of, queue_of, wait_of
from headrace.protocols.progress_text import ProgressWords
from headrace.protocols.prompt_ids import ids_of
from headrace.protocols.requests import decode
from headrace.protocols.worker_model import WorkerModels
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
from headrace.streams.usage import UsageCounter
from headrace.text.text_model import TextModel
from headrace_common.answer import JoinedPieces, call_id, runs
from headrace_common.errors import RequestError
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece
from headrace_common.request import Prompt, Request, Route
from headrace_common.worker_jobs import CountTokens, TokenCount

ROUTE: Route = "/v1/messages"
SUMMARY = "Answer a conversation, as in Anthropic's API"
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
    name: kind for name, kind in COMMON.items() if name not in _NOT_HERE
}
_OWN: Mapping[str, Kind] = {
    # `thread` is checked first. After an error about `thread`, the client sends all messages.
    "thread": NotServed(),
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
# Chat templates have no reasoning effort above high, so these two efforts are read as high.
_MOST_EFFORT = ("xhigh", "max")


def read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body's fields in chat's format, after every check that needs no model."""
    check_required(REQUIRED, body)
    most = TABLE["max_tokens"].check(body["max_tokens"], "max_tokens")
    passed = {name: body[name] for name in (*_AS_IN_CHAT, *UNSUPPORTED) if name in body}
    own = read_fields(_OWN, body)
    fields = openai_chat.read(passed | _to_chat(own)) | {"max_tokens": most}
    tools = own.get("tools", ReadTools())
    more = {"tool_paths": tools.paths, "toolsets": tools.toolsets, "skipped": _skipped(own)}
    return fields | more


def read_counted(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that make up the prompt; max_tokens and other fields may be missing."""
    check_required(COUNTED_REQUIRED, body)
    own = read_fields(_OWN, body)
    fields = openai_chat.read(_to_chat(own)) | {"skipped": _skipped(own)}
    refuse_images(fields["messages"], "this route counts text only")
    return fields


def do(job: CountTokens, body: bytes, models: WorkerModels) -> TokenCount:
    """Count the prompt tokens of a body."""
    decoded = decode(body)
    remove_inserted(decoded, ROUTE, job.client)
    with models.noting(decoded):
        fields = read_counted(decoded)
    model = models.get(fields["model"]).model
    (prompt,) = to_prompts(fields)
    names = (*ignored(TABLE, decoded), *fields["skipped"], *unknown_within(decoded, ROUTE))
    num_tokens = len(ids_of(model, prompt, models.rendering).token_ids)
    return TokenCount(num_tokens, header_of(names))


def _skipped(own: dict[str, Any]) -> tuple[str, ...]:
    """Return the paths of the blocks and tools that the model does not see."""
    system, tools = own.get("system", ReadTurns()), own.get("tools", ReadTools())
    return tuple(system.skipped + own["messages"].skipped + tools.skipped)


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """Make the request as chat does, with the names of toolsets."""
    request = openai_chat.to_request(fields, prompts, model)
    if request.channels is None or not fields["toolsets"]:
        return request
    channels = msgspec.structs.replace(request.channels, toolsets=fields["toolsets"])
    return msgspec.structs.replace(request, channels=channels)


def _to_chat(own: dict[str, Any]) -> dict[str, Any]:
    """Return the checked fields as a chat body. The caller checks this body like any chat body."""
    config, choice = own.get("output_config", {}), own.get("tool_choice", ToolUse())
    kwargs = {"enable_thinking": own["thinking"]} if "thinking" in own else {}
    system, messages = own.get("system", ReadTurns()).messages, own["messages"].messages
    starts_answer = _starts_answer(messages)
    effort = config.get("effort")
    tools = own.get("tools", ReadTools())
    wanted = _wanted(choice.wanted, tools)
    return {
        "model": own["model"],
        "messages": system + messages,
        "continue_final_message": starts_answer,
        "tools": tools.functions,
        "tool_choice": wanted,
        "parallel_tool_calls": choice.is_parallel,
        "stop": list(own.get("stop_sequences", ())),
        "reasoning_effort": "high" if effort in _MOST_EFFORT else effort,
        "response_format": own.get("output_format") or config.get("format"),
        "chat_template_kwargs": kwargs | own.get("chat_template_kwargs", {}),
    }


def _wanted(wanted: str | dict[str, Any], tools: ReadTools) -> str | dict[str, Any]:
    """Return the tool choice in chat's format; a toolset member may be chosen by its own name.

    Raise RequestError if a call is required, but this server cannot offer the chosen tool, or
    cannot offer any tool.
    """
    if wanted == "required" and not tools.functions:
        reason = "this server cannot offer any of the tools to the model"
        reason = reason if tools.skipped else "no tools were sent"
        message = f'tool_choice is "any", but {reason}. Send tools with an input_schema, or '
        message += "send tool_choice auto."
        raise RequestError("invalid_value", message, "tool_choice")
    name = wanted["function"]["name"] if isinstance(wanted, dict) else None
    if name in tools.skipped_types:
        kind = shown(tools.skipped_types[name])
        message = f"tool_choice names {name}, but this server cannot offer a tool of type "
        message += f"{kind} to the model. Send the tool with an input_schema, choose another tool, "
        message += "or send tool_choice auto."
        raise RequestError("unsupported_parameter", message, "tool_choice.name")
    names = [tool["function"]["name"] for tool in tools.functions]
    found = [flat for flat, toolset in tools.toolsets.items() if flat == f"{toolset}__{name}"]
    if len(found) == 1 and name not in names:
        return {"type": "function", "function": {"name": found[0]}}
    return wanted


def _starts_answer(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message. An empty last message is removed."""
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
    """Renders the SSE frames of one stream in a valid order."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._options = record.request.response_options
        self._tally = UsageCounter()
        self._is_open = False
        self._blocks: Blocks[bytes] = Blocks(self)
        self._words = ProgressWords(record)
        # The prompt's progress; empty from the first token on. Empty deltas carry this progress.
        self._progress: dict[str, Any] = {}

    def render(self, event: AnyEvent) -> list[bytes]:
        """Return the frames of one event: none, one or several."""
        # Only message_start contains the usage so far, so later events are not counted.
        if not self._is_open:
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
        """Return a heartbeat: a ping event, or a comment before message_start is sent."""
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
        fields = wait_of(event) if self._options.return_progress else {}
        return self._report(**fields) if fields else [self.idle()]

    def _sign(self) -> list[bytes]:
        """Return a sign of life for clients that ignore pings: an empty delta of the open block.

        If no block was opened yet, open a text block. The answer's text will continue that block.
        """
        blocks = self._blocks
        if blocks.open is None and (blocks.num_opened or self._record.rendering == 0):
            return [self.idle()]
        opening = [] if blocks.open else blocks.begin(_NO_TEXT)
        assert blocks.open is not None
        return [*self._open(), *opening, _delta(blocks.open, "", **self._progress)]

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
    """Collects the whole answer of one stream."""

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
        assert self._finish, "a whole answer is read before its stream has ended"
        usage, request = self._finish.usage, self._record.request
        content = [self._filled(run) for run in runs(self._pieces)]
        stop = _stop(self._finish.ends[0], usage, request)
        return _message(self._record, content, stop, usage) | ingestion_of(self._finish)

    def _filled(self, run: JoinedPieces) -> dict[str, Any]:
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


def _block(record: Record, block: Block | JoinedPieces) -> dict[str, Any]:
    """Return an empty content block, in the format of content_block_start."""
    if block.channel == TOOL:
        tool_id = call_id(record.id, 0, block.call, "toolu_")
        channels = record.request.channels
        toolset = channels.toolsets.get(block.name) if channels else None
        name = block.name.removeprefix(f"{toolset}__")
        call = {"type": "tool_use", "id": tool_id, "name": name, "input": {}}
        return call | ({"toolset_name": toolset} if toolset else {})
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
    """Return the values of stop_reason and stop_sequence."""
    if end.finish_reason == "length":
        is_limit = usage.completion_tokens == request.sampling.max_tokens
        return ("max_tokens" if is_limit else "model_context_window_exceeded"), None
    if end.finish_reason == "tool_calls":
        return "tool_use", None
    if isinstance(end.stop_reason, str):
        return "stop_sequence", end.stop_reason
    return "end_turn", None


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the token counts in Anthropic's format.

    Prompt tokens from the cache are counted separately. No tokens are reported as written to the
    cache.
    """
    shown: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }
    if usage.reasoning_tokens:
        shown["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return shown
