"""Renders the answers and errors of Ollama's generation routes as lines of JSON."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from headrace.protocols.blocks import Block, Blocks
from headrace.protocols.dialect import encode
from headrace.protocols.fields.tools import arguments_of
from headrace.protocols.openai.chunks import (
    ingestion_of,
    logprobs_of,
    progress_of,
    queue_of,
    wait_of,
)
from headrace.protocols.progress_text import ProgressWords
from headrace.streams.events import (
    AnyEvent,
    Error,
    Finish,
    Heartbeat,
    Progress,
    Queued,
    Served,
    TokenLogprob,
    Tokens,
)
from headrace.streams.record import Record
from headrace_common.answer import call_id, runs
from headrace_common.errors import RequestError
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece
from headrace_common.request import Route

_NS = 1_000_000  # nanoseconds in a millisecond
_OWN_PATHS = (
    (re.compile(r"\bresponse_format(\.json_schema\.schema)?"), "format"),
    (re.compile(r"\bchat_template_kwargs\.enable_thinking\b"), "think"),
)
"""Pairs of a regular expression and a replacement.

The replacement turns the path of a chat field into the path of this API's field.
"""


class OllamaErrors:
    """Formats an error as a message under `error`; `code` is Headrace's own field.

    In a stream, the error is a separate line.
    """

    REQUEST_ID = "X-Request-Id"
    OWN_PATHS = _OWN_PATHS
    SCHEMA: Mapping[str, Any] = {
        "title": "OllamaError",
        "type": "object",
        "required": ["error", "code"],
        "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
    }

    def status(self, error: RequestError | Error) -> int:
        return error.status if isinstance(error, Error) else error.kind.status

    def body(self, error: RequestError | Error, request_id: str = "") -> bytes:
        message = error.message
        for known, own in _OWN_PATHS:
            message = known.sub(own, message)
        return encode({"error": message, "code": error.code})

    def frame(self, error: RequestError | Error) -> bytes:
        return self.body(error) + b"\n"


ERRORS = OllamaErrors()


class LinePart(NamedTuple):
    """The text, reasoning, calls and log probabilities that one line adds."""

    text: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


Shape = Callable[[LinePart], dict[str, Any]]
"""Formats a LinePart for one route."""


def as_message(part: LinePart) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.text}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}


def as_response(part: LinePart) -> dict[str, Any]:
    thinking = {"thinking": part.thinking} if part.thinking else {}
    return {"response": part.text} | thinking


def unloaded(model: str, route: Route) -> dict[str, Any]:
    """Return the answer to a request that unloads a model."""
    shape = as_message if route == "/api/chat" else as_response
    created_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"model": model, "created_at": created_at}
    return head | shape(LinePart()) | {"done": True, "done_reason": "unload"}


class _AnswerLines:
    """Builds the lines of one stream."""

    def __init__(self, record: Record, shape: Shape) -> None:
        self.record = record
        self._shape = shape
        self._at_ms = 0
        self._load_ms = 0

    def feed(self, event: AnyEvent) -> None:
        """Record the times of an event. The caller passes every event from seq 0, in order."""
        self._at_ms = event.at_ms
        if isinstance(event, Served):
            self._load_ms = event.at_ms

    def going_on(self, part: LinePart, **more: Any) -> dict[str, Any]:
        return self._head() | self._shown(part) | {"done": False} | more

    def ended(self, part: LinePart, event: Finish) -> dict[str, Any]:
        """Return the last line, with durations in nanoseconds.

        `eval_duration` is all time that was spent neither in the queue nor on the prompt.
        """
        timings, (end,) = event.timings, event.ends
        before_ms = timings.queue_ms + timings.prompt_ms
        is_load = self.record.request.sampling.max_tokens == 0
        return {
            **self._head(),
            **self._shown(part),
            "done": True,
            "done_reason": "load" if is_load else _REASONS.get(end.finish_reason, "stop"),
            "total_duration": _NS * event.at_ms,
            "load_duration": _NS * self._load_ms,
            "prompt_eval_count": event.usage.prompt_tokens,
            "prompt_eval_duration": round(_NS * timings.prompt_ms),
            "eval_count": event.usage.completion_tokens,
            "eval_duration": max(0, round(_NS * (event.at_ms - before_ms))),
            **ingestion_of(event),
        }

    def call(self, number: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"index": number, "name": name, "arguments": arguments_of(arguments)}
        return {"id": call_id(self.record.id, 0, number), "function": function}

    def _head(self) -> dict[str, Any]:
        record = self.record
        at = datetime.fromtimestamp(record.created, UTC) + timedelta(milliseconds=self._at_ms)
        created_at = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"model": record.request.shown_model, "created_at": created_at}

    def _shown(self, part: LinePart) -> dict[str, Any]:
        logprobs = {"logprobs": logprobs_of(part.logprobs)} if part.logprobs else {}
        return self._shape(part) | logprobs


_REASONS = {"length": "length"}


class OllamaFrames:
    """Renders the lines of one stream. A tool call is sent only once it is complete."""

    def __init__(self, record: Record, shape: Shape) -> None:
        self._options = record.request.response_options
        self._lines = _AnswerLines(record, shape)
        self._blocks: Blocks[LinePart] = Blocks(self)
        self._words = ProgressWords(record)
        # The arguments of the open call so far.
        self._arguments = ""

    def render(self, event: AnyEvent) -> list[bytes]:
        """Return the lines of one event: none, one or several."""
        self._lines.feed(event)
        match event:
            case Tokens():
                return [self._line(part) for part in self._parts(event)]
            case Heartbeat():
                return self._heartbeat(event)
            case Queued() if self._options.return_progress:
                return [self._line(queue=queue_of(event))]
            case Progress() if self._options.return_progress:
                words = LinePart(thinking=self._words.take(event))
                return [self._line(words, prompt_progress=progress_of(event))]
            case Finish():
                return [encode(self._lines.ended(LinePart(), event)) + b"\n"]
            case Error():
                return [ERRORS.frame(event)]
        return []

    def idle(self) -> bytes:
        """Return a heartbeat: a line without content."""
        return self._line()

    def _heartbeat(self, event: Heartbeat) -> list[bytes]:
        if not self._options.heartbeat and event.form != "comment":
            return []
        fields = wait_of(event) if self._options.return_progress else {}
        return [self._line(**fields)]

    def _line(self, part: LinePart = LinePart(), **more: Any) -> bytes:  # noqa: B008, for it is a constant
        return encode(self._lines.going_on(part, **more)) + b"\n"

    def _parts(self, event: Tokens) -> list[LinePart]:
        parts = [part for run in runs(event.pieces) for part in self._blocks.feed(run)]
        if event.end:
            parts += self._blocks.close()
        if not event.logprobs:
            return parts
        first, *others = parts or [LinePart()]
        return [first._replace(logprobs=event.logprobs), *others]

    def opened(self, block: Block) -> list[LinePart]:
        self._arguments = ""
        return []

    def grown(self, block: Block, text: str) -> list[LinePart]:
        if block.channel == TOOL:
            self._arguments += text
            return []
        return [LinePart(thinking=text) if block.channel == REASONING else LinePart(text)]

    def closed(self, block: Block) -> list[LinePart]:
        if block.channel != TOOL:
            return []
        return [LinePart(calls=(self._lines.call(block.call, block.name, self._arguments),))]


class OllamaBody:
    """Collects the whole answer of one stream."""

    def __init__(self, record: Record, shape: Shape) -> None:
        self._lines = _AnswerLines(record, shape)
        self._pieces: list[ChannelPiece] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish: Finish | None = None

    def feed(self, event: AnyEvent) -> None:
        self._lines.feed(event)
        match event:
            case Tokens():
                self._pieces += event.pieces
                self._logprobs += event.logprobs
            case Finish():
                self._finish = event

    def whole(self) -> dict[str, Any]:
        assert self._finish, "a whole answer is read before its stream has ended"
        found = [run for run in runs(self._pieces) if run.channel == TOOL]
        calls = tuple(self._lines.call(run.call, run.name, run.text) for run in found)
        text, thinking = (self._joined(channel) for channel in (CONTENT, REASONING))
        part = LinePart(text, thinking, calls, tuple(self._logprobs))
        return self._lines.ended(part, self._finish)

    def _joined(self, channel: str) -> str:
        return "".join(piece.text for piece in self._pieces if piece.channel == channel)
