"""Common parts of OpenAI's routes for chat and text completions: chunks, whole answers, errors.

Each of the two routes formats a choice with its own Shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import UnsetType

from headrace.protocols.dialect import ErrorFormat, data, encode
from headrace.protocols.progress_text import ProgressWords
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
from headrace.streams.usage import UsageCounter
from headrace_common.errors import KINDS, RequestError
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece

DONE = b"data: [DONE]\n\n"
KEYS: tuple[str, ...] = ("id", "object", "created", "model", "choices", "usage", "timings")

Choice = dict[str, Any]
"""One entry of `choices`, with its keys in the order in which they are sent."""


class Part(NamedTuple):
    """The text that one event adds to a choice, with its log probabilities."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    reasoning: str = ""
    # Pieces of tool calls.
    calls: tuple[ChannelPiece, ...] = ()


class Shape(Protocol):
    """Formats the choices of one route.

    A shape can count positions in the text, so each rendering of a stream needs a new shape.
    """

    whole_object: str
    chunk_object: str
    # True if a choice contains its prompt's token ids, False if the ids are next to `choices`.
    has_prompt_in_choice: bool

    def opening(self) -> list[Choice]:
        """Return the chunks that must precede any text."""

    def idle(self, index: int) -> Choice:
        """Return a choice without content."""

    def part(self, index: int, part: Part) -> Choice: ...

    def end(self, index: int, end: ChoiceEnd) -> Choice: ...

    def whole(self, index: int, parts: Sequence[Part], end: ChoiceEnd) -> Choice: ...


def error_of(error: RequestError | Error) -> dict[str, Any]:
    """Return the object that describes an error."""
    if isinstance(error, Error):
        return {"message": error.message, "type": error.type, "param": None, "code": error.code}
    shown = {"message": error.message, "type": error.kind.type}
    return shown | {"param": error.param, "code": error.code, **error.extra}


class OpenaiErrors:
    """Formats an error as an object under `error`, also in frames."""

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
    # The fast path: most events have a single piece of text.
    if len(event.pieces) == 1 and event.pieces[0].channel == CONTENT:
        return Part(event.pieces[0].text, event.logprobs)
    text = "".join(piece.text for piece in event.pieces if piece.channel == CONTENT)
    reasoning = "".join(piece.text for piece in event.pieces if piece.channel == REASONING)
    calls = tuple(piece for piece in event.pieces if piece.channel == TOOL)
    return Part(text, event.logprobs, reasoning, calls)


class ChunkFrames:
    """Renders the SSE frames of one stream, with the usage and timings that the client wants."""

    def __init__(self, record: Record, shape: Shape, words: ProgressWords | None = None) -> None:
        self._record = record
        self._options = record.request.response_options
        self._shape = shape
        # Writes progress as reasoning; None on a route without reasoning.
        self._words = words
        self._serve(record.system_fingerprint)
        self._tally = UsageCounter()
        options = self._options
        # If no chunk with the usage follows, the last chunk of a choice carries the timings.
        self._has_figures = (
            options.continuous_usage or options.timings_per_token or not options.include_usage
        )
        self._has_extras = options.continuous_usage or options.return_token_ids
        self._is_open = False
        self._num_running = record.request.num_choices
        self._pending_ids: list[list[int]] = [[] for _ in range(self._num_running)]
        self._sent_prompts: set[int] = set()

    def render(self, event: AnyEvent) -> list[bytes]:
        """Return the frames of one event: none, one or several."""
        if self._has_figures:
            self._tally.feed(event)
        if not isinstance(event, Tokens):
            return self._render_other(event)
        # For developers: the code below runs for every token. Keep the code in one function.
        part = _part_of(event)
        if self._options.return_token_ids:
            self._pending_ids[event.choice] += event.ids
        frames = []
        if any(part):
            choice = self._shape.part(event.choice, part)
            frames.append(self._with_figures(event.choice, choice, self._options.timings_per_token))
        if event.end:
            self._num_running -= 1
            choice = self._shape.end(event.choice, event.end)
            is_last = not self._num_running and not self._options.include_usage
            frames.append(self._with_figures(event.choice, choice, is_last))
        if frames and not self._is_open:
            return self._open() + frames
        return frames

    def _render_other(self, event: AnyEvent) -> list[bytes]:
        """Return the frames of an event that is not Tokens."""
        match event:
            case Accepted():
                # Without the option `heartbeat`, a client would mistake this frame for the first
                # token.
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
        """Return a heartbeat: a valid frame that adds nothing to the answer."""
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
        fields = wait_of(event) if self._options.return_progress else {}
        return self._chunk([self._shape.idle(0)], **fields)

    def _progress(self, event: Progress) -> list[bytes]:
        if not self._options.return_progress:
            return []
        idle = [] if self._options.progress_as_llama_cpp else [self._shape.idle(event.choice)]
        frame = self._chunk(idle, prompt_progress=progress_of(event))
        line = self._words.take(event) if self._words else ""
        if not line:
            return [frame]
        choice = self._shape.part(event.choice, Part("", (), reasoning=line))
        return [frame, *self._open(), self._chunk([choice])]

    def _finish(self, event: Finish) -> list[bytes]:
        more = ingestion_of(event)
        if not self._options.include_usage:
            return [self._chunk([], **more), DONE] if more else [DONE]
        timings = timings_of(event.timings)
        return [self._chunk([], usage=usage_of(event.usage), timings=timings, **more), DONE]

    def _with_figures(self, index: int, choice: Choice, has_timings: bool) -> bytes:
        """Return a chunk with the usage, timings and token ids that belong to the chunk."""
        if not has_timings and not self._has_extras:
            return self._chunk([choice])
        more: dict[str, Any] = {}
        if self._options.continuous_usage:
            more["usage"] = usage_of(self._tally.usage)
        if has_timings:
            more["timings"] = timings_of(self._tally.timings)
        if self._options.return_token_ids:
            place = choice if self._shape.has_prompt_in_choice else more
            self._add_prompt_ids(index, place)
            choice["token_ids"] = self._pending_ids[index]
            self._pending_ids[index] = []
        return self._chunk([choice], **more)

    def _add_prompt_ids(self, index: int, place: dict[str, Any]) -> None:
        owner = index if self._shape.has_prompt_in_choice else 0
        if owner not in self._sent_prompts:
            self._sent_prompts.add(owner)
            place["prompt_token_ids"] = self._record.prompt_ids(owner // self._record.request.n)

    def _chunk(self, choices: list[Choice], **more: Any) -> bytes:
        rest = encode({"choices": choices} | more)
        return b"data: " + self._head + b"," + rest[1:] + b"\n\n"


class ChunkBody:
    """Collects the whole answer of one stream."""

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
        assert self._finish, "a whole answer is read before its stream has ended"
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
    """Return fields for a heartbeat: the engine's restart attempt, or the load progress.

    The result is empty for a heartbeat that only shows that the server is alive.
    """
    if event.attempt is not None:
        return {"recovering": {"attempt": event.attempt}}
    load = {"progress": event.progress, "stage": event.stage or None}
    fields = {name: value for name, value in load.items() if value is not None}
    return {"loading": fields} if fields else {}


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
    """Return the ingestion report as fields of a frame; empty if the report was not requested."""
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


def logprobs_of(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return each token with the likeliest tokens at its position."""
    return [_entry(it) | {"top_logprobs": [_entry(top) for top in it.top]} for it in entries]


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def timings_of(timings: Timings) -> dict[str, Any]:
    """Return timings and rates. The rates of predicted tokens count the steps between tokens."""
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
