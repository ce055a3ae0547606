"""Common parts of OpenAI's two generation routes: chunks, whole answers, errors.

The look of a choice in them is the route's own: its Shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import UnsetType

from headrace.protocols.dialect import ErrorFormat, data, encode
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
    Served,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)
from headrace.streams.record import Record
from headrace.streams.tally import Tally
from headrace_common.errors import KINDS, RequestError
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece

DONE = b"data: [DONE]\n\n"
KEYS: tuple[str, ...] = ("id", "object", "created", "model", "choices", "usage", "timings")

Choice = dict[str, Any]
"""One entry of `choices`, its keys in the order of the wire."""


class Part(NamedTuple):
    """The text that one event adds to a choice, with its log probabilities."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    reasoning: str = ""
    calls: tuple[ChannelPiece, ...] = ()  # of tools


class Shape(Protocol):
    """Made anew for each rendering, since it counts places in the text along."""

    whole_object: str
    chunk_object: str
    has_prompt_in_choice: bool  # where the prompt's token ids go, if asked for

    def opening(self) -> list[Choice]:
        """The chunks that must precede any text."""

    def idle(self, index: int) -> Choice:
        """A choice with nothing to say."""

    def part(self, index: int, part: Part) -> Choice: ...

    def end(self, index: int, end: ChoiceEnd) -> Choice: ...

    def whole(self, index: int, parts: Sequence[Part], end: ChoiceEnd) -> Choice: ...


def error_of(error: RequestError | Error) -> dict[str, Any]:
    """The error object."""
    if isinstance(error, Error):
        return {"message": error.message, "type": error.type, "param": None, "code": error.code}
    shown = {"message": error.message, "type": error.kind.type}
    return shown | {"param": error.param, "code": error.code, **error.extra}


class OpenaiErrors:
    """An error object under `error`, in frames too."""

    REQUEST_ID = "X-Request-Id"
    SCHEMA: Mapping[str, Any] = {
        "title": "Error",
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"enum": sorted({kind.type for kind in KINDS.values()})},
                    "param": {"type": ["string", "null"]},
                    "code": {"enum": sorted(KINDS)},
                },
            }
        },
    }

    def status(self, error: RequestError | Error) -> int:
        return error.status if isinstance(error, Error) else error.kind.status

    def body(self, error: RequestError | Error, request_id: str = "") -> bytes:
        return encode({"error": error_of(error)})

    def frame(self, error: RequestError | Error) -> bytes:
        return data(self.body(error))


ERRORS: ErrorFormat = OpenaiErrors()


def _head(record: Record, kind: str, fingerprint: str) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": kind,
        "created": record.created,
        "model": record.request.shown_model,
        "system_fingerprint": fingerprint or None,
    }


def _part_of(event: Tokens) -> Part:
    if len(event.pieces) == 1 and event.pieces[0].channel == CONTENT:  # most events are
        return Part(event.pieces[0].text, event.logprobs)
    text = "".join(piece.text for piece in event.pieces if piece.channel == CONTENT)
    reasoning = "".join(piece.text for piece in event.pieces if piece.channel == REASONING)
    calls = tuple(piece for piece in event.pieces if piece.channel == TOOL)
    return Part(text, event.logprobs, reasoning, calls)


class ChunkFrames:
    """The SSE frames of one stream: owns their order and what rides on them."""

    def __init__(self, record: Record, shape: Shape, words: ProgressWords | None = None) -> None:
        self._record = record
        self._options = record.request.response_options
        self._shape = shape
        self._words = words  # of a route that has reasoning
        self._serve(record.system_fingerprint)
        self._tally = Tally()
        options = self._options
        # without usage at the end, timings ride on the last chunk
        self._has_figures = (
            options.continuous_usage or options.timings_per_token or not options.include_usage
        )
        self._tells_more = options.continuous_usage or options.return_token_ids
        self._is_open = False
        self._num_running = record.request.num_choices
        self._untold_ids: list[list[int]] = [[] for _ in range(self._num_running)]
        self._told_prompts: set[int] = set()

    def render(self, event: AnyEvent) -> list[bytes]:
        """The frames of one event: none, one or several."""
        if self._has_figures:
            self._tally.feed(event)
        if not isinstance(event, Tokens):
            return self._render_other(event)
        # To developers: what follows runs for every token. Keep it one function.
        part = _part_of(event)
        if self._options.return_token_ids:
            self._untold_ids[event.choice] += event.ids
        frames = []
        if any(part):
            choice = self._shape.part(event.choice, part)
            frames.append(self._told(event.choice, choice, self._options.timings_per_token))
        if event.end:
            self._num_running -= 1
            choice = self._shape.end(event.choice, event.end)
            is_last = not self._num_running and not self._options.include_usage
            frames.append(self._told(event.choice, choice, is_last))
        if frames and not self._is_open:
            return self._open() + frames
        return frames

    def _render_other(self, event: AnyEvent) -> list[bytes]:
        """The frames of an event that is not Tokens."""
        match event:
            case Accepted():
                # without heartbeats, the first frame is a client's sign of the first token
                return self._open() or [self.idle()] if self._options.heartbeat else []
            case Queued():
                if not self._options.return_progress:
                    return []
                return [self._chunk([self._shape.idle(0)], queue=queue_of(event))]
            case Heartbeat():
                return [self._heartbeat(event)] if self._options.heartbeat else []
            case Served():
                self._serve(event.system_fingerprint)
                return []
            case Progress():
                return self._progress(event)
            case Finish():
                return self._finish(event)
        assert isinstance(event, Error)
        return [ERRORS.frame(event)]

    def idle(self) -> bytes:
        """A heartbeat: parses as data, adds nothing."""
        return self._chunk([self._shape.idle(0)])

    def _serve(self, fingerprint: str) -> None:
        head = _head(self._record, self._shape.chunk_object, fingerprint)
        self._head = encode(head)[:-1]

    def _open(self) -> list[bytes]:
        if self._is_open:
            return []
        self._is_open = True
        return [self._chunk([choice]) for choice in self._shape.opening()]

    def _heartbeat(self, event: Heartbeat) -> bytes:
        told = wait_of(event) if self._options.return_progress else {}
        return self._chunk([self._shape.idle(0)], **told)

    def _progress(self, event: Progress) -> list[bytes]:
        if not self._options.return_progress:
            return []
        idle = self._shape.idle(event.choice)
        told = self._chunk([idle], prompt_progress=progress_of(event))
        line = self._words.take(event) if self._words else ""
        if not line:
            return [told]
        said = self._shape.part(event.choice, Part("", (), reasoning=line))
        return [told, *self._open(), self._chunk([said])]

    def _finish(self, event: Finish) -> list[bytes]:
        more = ingestion_of(event)
        if not self._options.include_usage:
            return [self._chunk([], **more), DONE] if more else [DONE]
        timings = timings_of(event.timings)
        return [self._chunk([], usage=usage_of(event.usage), timings=timings, **more), DONE]

    def _told(self, index: int, choice: Choice, has_timings: bool) -> bytes:
        """A chunk with text or an end, and the figures that go with it."""
        if not has_timings and not self._tells_more:
            return self._chunk([choice])
        more: dict[str, Any] = {}
        if self._options.continuous_usage:
            more["usage"] = usage_of(self._tally.usage)
        if has_timings:
            more["timings"] = timings_of(self._tally.timings)
        if self._options.return_token_ids:
            place = choice if self._shape.has_prompt_in_choice else more
            self._tell_prompt(index, place)
            choice["token_ids"] = self._untold_ids[index]
            self._untold_ids[index] = []
        return self._chunk([choice], **more)

    def _tell_prompt(self, index: int, place: dict[str, Any]) -> None:
        owner = index if self._shape.has_prompt_in_choice else 0
        if owner not in self._told_prompts:
            self._told_prompts.add(owner)
            place["prompt_token_ids"] = self._record.prompt_ids(owner // self._record.request.n)

    def _chunk(self, choices: list[Choice], **more: Any) -> bytes:
        rest = encode({"choices": choices} | more)
        return b"data: " + self._head + b"," + rest[1:] + b"\n\n"


class ChunkBody:
    """The whole answer of one stream."""

    def __init__(self, record: Record, shape: Shape) -> None:
        self._record = record
        self._shape = shape
        self._fingerprint = record.system_fingerprint
        self._finish: Finish | None = None
        num_choices = record.request.num_choices
        self._parts: list[list[Part]] = [[] for _ in range(num_choices)]
        self._ids: list[list[int]] = [[] for _ in range(num_choices)]

    def feed(self, event: AnyEvent) -> None:
        match event:
            case Tokens():
                self._parts[event.choice].append(_part_of(event))
                self._ids[event.choice] += event.ids
            case Served():
                self._fingerprint = event.system_fingerprint
            case Finish():
                self._finish = event

    def whole(self) -> dict[str, Any]:
        assert self._finish, "an answer is asked for before its end"
        shape = self._shape
        body = _head(self._record, shape.whole_object, self._fingerprint)
        body["choices"] = [self._choice(shape, i, end) for i, end in enumerate(self._finish.ends)]
        body["usage"] = usage_of(self._finish.usage)
        body["timings"] = timings_of(self._finish.timings)
        if (
            self._record.request.response_options.return_token_ids
            and not shape.has_prompt_in_choice
        ):
            body["prompt_token_ids"] = self._record.prompt_ids(0)
        return body | ingestion_of(self._finish)

    def _choice(self, shape: Shape, index: int, end: ChoiceEnd) -> Choice:
        choice = shape.whole(index, self._parts[index], end)
        if self._record.request.response_options.return_token_ids:
            if shape.has_prompt_in_choice:
                prompt = index // self._record.request.n
                choice["prompt_token_ids"] = self._record.prompt_ids(prompt)
            choice["token_ids"] = self._ids[index]
        return choice


def wait_of(event: Heartbeat) -> dict[str, Any]:
    """Beside a heartbeat: which start of the engine is waited for, or what the model's load does.

    Empty for one that only shows that the server lives.
    """
    if event.attempt is not None:
        return {"recovering": {"attempt": event.attempt}}
    load = {"progress": event.progress, "stage": event.stage or None}
    told = {name: value for name, value in load.items() if value is not None}
    return {"loading": told} if told else {}


def queue_of(event: Queued) -> dict[str, Any]:
    return {"position": event.position, "waiting": event.waiting, "eta_ms": event.eta_ms}


def progress_of(event: Progress) -> dict[str, Any]:
    return {
        "total": event.total,
        "cache": event.cache,
        "processed": event.processed,
        "time_ms": event.time_ms,
    }


def ingestion_of(event: Finish) -> dict[str, Any]:
    """Fields beside an answer whose request asked how its prompt was computed."""
    if isinstance(event.ingestion, UnsetType):
        return {}
    return {"headrace": {"ingestion": event.ingestion}}


def usage_of(usage: Usage) -> dict[str, Any]:
    shown = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        shown["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shown


def timings_of(timings: Timings) -> dict[str, Any]:
    """Timings and the rates that follow from them; predicted ones count steps between tokens."""
    num_steps = max(timings.predicted_n - 1, 0)
    shown = {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": _ratio(timings.prompt_ms, timings.prompt_n),
        "prompt_per_second": _ratio(1000 * timings.prompt_n, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": _ratio(timings.predicted_ms, num_steps),
        "predicted_per_second": _ratio(1000 * num_steps, timings.predicted_ms),
        "queue_ms": timings.queue_ms,
        "max_gap_ms": timings.max_gap_ms,
    }
    if timings.draft_n:
        shown |= {"draft_n": timings.draft_n, "draft_n_accepted": timings.draft_n_accepted}
    return shown


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0
