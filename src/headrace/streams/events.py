"""Defines the events of a log. A log is the ordered list of all events of a stream.

`seq` starts at 0 and grows by 1; `at_ms` is the time since admission in milliseconds. Only the
last event is terminal: Finish or Error. An appended event never changes.
"""

import msgspec
from msgspec import UNSET, UnsetType

from headrace.streams.record import ServedSetup
from headrace_common.ids import StreamId
from headrace_common.ingestion import Ingestion
from headrace_common.pieces import ChannelPiece


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with its log probability, and the most likely tokens at the token's position.

    `token` shows partial UTF-8 characters as U+FFFD; `bytes` is exact. `logprob` is None for the
    first token of an echoed prompt, because no token precedes the first token.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


class ChoiceEnd(msgspec.Struct, frozen=True):
    """How one choice ended; `stop_reason` is the stop string or stop token that matched."""

    finish_reason: str
    stop_reason: str | int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request. A prompt counts once, even if it has several choices.

    `completion_tokens` counts all generated tokens, including the end token.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Timings(msgspec.Struct, frozen=True):
    """Times in milliseconds and counts for the whole request; 0 for a phase that did not happen."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    # The time from the first token to the last token.
    predicted_ms: float = 0.0
    queue_ms: float = 0.0
    # The longest time between two successive tokens of one choice.
    max_gap_ms: float = 0.0
    # Tokens proposed by speculative decoding.
    draft_n: int = 0
    # Proposed tokens that the model accepted.
    draft_n_accepted: int = 0


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, kw_only=True):
    """The base class of all events."""

    seq: int
    at_ms: int


class Accepted(Event, frozen=True):
    """Event 0 of every stream: the request was admitted.

    `mode` is "continue" if the answer extends a final assistant message, else "fresh".
    """

    id: StreamId
    route: str
    model: str
    created: int
    mode: str
    prompt_tokens: int
    n: int
    seed: int
    durable: bool = False


class Queued(Event, frozen=True):
    """The request waits at `position` in a queue of length `waiting`; position 1 runs next.

    `eta_ms` is None until the speed of the engine is known.
    """

    position: int
    waiting: int
    eta_ms: int | None


class Heartbeat(Event, frozen=True, omit_defaults=True):
    """A sign of life for protocols that resume by byte position.

    Every stream also uses heartbeats to report that its engine died, and how far its model is
    loaded.

    `state` is loading, queued, prompt, decode or recovering. `form` says how the heartbeat is
    sent: as data, as a comment, or as a sign (a frame that every client counts as a sign of
    life).

    `attempt` numbers the stream's recoveries from 1 and is set when a recovery starts. While the
    model is loading, `progress` is the fraction of the weights in memory, and `stage` describes
    the current part of the load.
    """

    state: str
    form: str
    attempt: int | None = None
    progress: float | None = None
    stage: str = ""


class Served(Event, frozen=True):
    """Reports the setup of a model that was loaded only after the request was admitted."""

    system_fingerprint: str
    served: ServedSetup


class Progress(Event, frozen=True):
    """`processed` of `total` prompt tokens are done, including `cache` tokens from the cache."""

    choice: int
    total: int
    cache: int
    processed: int
    time_ms: int
    # The number of chunks, and the sizes of the smallest and the largest chunk. UNSET unless the
    # client asked for chunks.
    chunks: tuple[int, int, int] | UnsetType = UNSET


class Tokens(Event, frozen=True, omit_defaults=True):
    """Tokens of one choice, and the text that these tokens completed; ids or text may be empty.

    The text can lag behind the ids: an incomplete UTF-8 character or a possible stop string is held
    back. `end` is set on the last Tokens event of a choice.

    `state` is the samplers' state after these tokens, or empty if the samplers have no state. A new
    engine continues from this state.
    """

    choice: int
    ids: tuple[int, ...] = ()
    pieces: tuple[ChannelPiece, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    # The number of ids that belong to reasoning.
    num_reasoning: int = 0
    # Tokens proposed by speculative decoding in the steps that produced these ids.
    num_guessed: int = 0
    # Proposed tokens that the model accepted.
    num_accepted: int = 0
    end: ChoiceEnd | None = None
    state: bytes = b""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Finish(Event, frozen=True):
    """Terminal: all choices have ended."""

    ends: tuple[ChoiceEnd, ...]
    usage: Usage
    timings: Timings
    # Set if the client asked for the ingestion report.
    ingestion: Ingestion | UnsetType = UNSET


class Error(Event, frozen=True):
    """Terminal: the stream was cut off. A cut stream is never rendered as a complete answer."""

    code: str
    type: str
    message: str
    status: int
    retryable: bool


Terminal = Finish | Error
AnyEvent = Accepted | Queued | Heartbeat | Served | Progress | Tokens | Terminal


_ANOTHER_MODEL = ("model_changed", "resume_mismatch")


def is_terminal(event: AnyEvent) -> bool:
    return isinstance(event, Terminal)


def frees_key(event: AnyEvent) -> bool:
    """Return whether a retry with the same idempotency key may run the request again after this
    event.
    """
    return isinstance(event, Error) and (event.retryable or event.code in _ANOTHER_MODEL)
