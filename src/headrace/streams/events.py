"""The events of a log: what a stream said, in order, for every reader alike.

`seq` starts at 0 and grows by 1; `at_ms` counts from admission. The last event, and only it, is
terminal: Finish or Error. An appended event never changes.
"""

import msgspec
from msgspec import UNSET, UnsetType

from headrace.streams.record import ServedSetup
from headrace_common.ids import StreamId
from headrace_common.pieces import ChannelPiece


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token with its log probability, and the likeliest in its place.

    `token` shows partial bytes as U+FFFD, `bytes` is exact; `logprob` is None where there is
    nothing to condition on (the first token of an echoed prompt).
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
    """Prompt tokens count once for any n; generated ones up to the end, end tokens included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Timings(msgspec.Struct, frozen=True):
    """Milliseconds and counts of the whole request; 0 where nothing was done."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0  # from the first to the last token
    queue_ms: float = 0.0
    max_gap_ms: float = 0.0  # longest wait between two tokens of a choice
    draft_n: int = 0  # tokens guessed ahead
    draft_n_accepted: int = 0  # of these, right


class Ingestion(msgspec.Struct, frozen=True, kw_only=True):
    """How the prompts of a request were computed: what happened, not what was intended.

    None: not measured. A chunk counts by the tokens with which it took its prompt further.
    """

    strategy: str | None  # the lane
    eligible: bool  # this model can take a prompt in parts
    applied: bool  # this one was
    reason: str
    boundary: str  # who cuts: step; "" without a lane
    mask: str
    memory: str | None
    encoder: str | None
    tokenization: str | None
    prompt_tokens: int
    cached_tokens: int
    chunks: int
    chunk_tokens: tuple[int, int] | None  # the smallest and the largest


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, kw_only=True):
    """Root of the union."""

    seq: int
    at_ms: int


class Accepted(Event, frozen=True):
    """Always seq 0: the request was admitted. `mode`: fresh, or continue a final message."""

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
    """Waits in the queue: `position` 1 of `waiting` is next; no `eta_ms` before a rate is known."""

    position: int
    waiting: int
    eta_ms: int | None


class Heartbeat(Event, frozen=True, omit_defaults=True):
    """A sign of life on a byte-addressed stream; on any stream, that its engine has died.

    `state`: loading, queued, prompt, decode, recovering. `form` says how it is sent: data, comment,
    or sign, which every client counts as life. `attempt` counts the recoveries of the stream from
    1, and is set where one begins. `progress` is the share of the model's weights in memory, while
    the stream waits for them, and `stage` what its load does, in words.
    """

    state: str
    form: str
    attempt: int | None = None
    progress: float | None = None
    stage: str = ""


class Served(Event, frozen=True):
    """The model has come into memory after the request was admitted; from now on it is known."""

    system_fingerprint: str
    served: ServedSetup


class Progress(Event, frozen=True):
    """`processed` of `total` prompt tokens are computed, `cache` of them taken from the cache."""

    choice: int
    total: int
    cache: int
    processed: int
    time_ms: int
    chunks: tuple[int, int, int] | UnsetType = UNSET  # number, smallest, largest; if asked for


class Tokens(Event, frozen=True, omit_defaults=True):
    """Tokens of one choice and the text they completed; either may be empty.

    Text may lag behind ids (unfinished UTF-8, a possible stop string). `end` is set on the last
    such event of a choice.
    """

    choice: int
    ids: tuple[int, ...] = ()
    pieces: tuple[ChannelPiece, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_reasoning: int = 0  # of the ids
    num_guessed: int = 0  # tokens guessed in their steps
    num_accepted: int = 0  # of these, right
    end: ChoiceEnd | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Finish(Event, frozen=True):
    """Terminal: all choices have ended."""

    ends: tuple[ChoiceEnd, ...]
    usage: Usage
    timings: Timings
    ingestion: Ingestion | UnsetType = UNSET  # if asked for


class Error(Event, frozen=True):
    """Terminal: the stream was cut; never rendered as a complete answer."""

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
    """Whether, after this end, the same idempotency key may run the request again."""
    return isinstance(event, Error) and (event.retryable or event.code in _ANOTHER_MODEL)
