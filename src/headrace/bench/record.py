"""The record of a measurement: what was sent, and when every token came; computes nothing."""

import itertools
from typing import Any

import msgspec


class CellPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One load: prompts of one length, sent at one rate beside running streams."""

    name: str
    prompt_tokens: int
    interval_s: float  # from one prompt to the next
    num_warm_up: int
    num_measured: int
    per_round: int = 1  # prompts after which the streams begin anew
    may_overlap: bool = False  # prompts may come before those before them are answered


class Injection(msgspec.Struct, frozen=True):
    """A prompt sent beside running streams; seconds since the cell began."""

    sent: float
    first_token: float | None  # None: there was none while the streams ran
    num_tokens: int
    is_warm_up: bool


class Round(msgspec.Struct, frozen=True):
    """Streams from start to end, and the prompts between; seconds since the cell began."""

    settled: float  # all streams run
    ended: float
    streams: tuple[tuple[float, ...], ...]  # when each token of each stream came
    injections: tuple[Injection, ...] = ()
    lost_at: float | None = None  # a stream ended before it was told to


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The server's own account of its steps during a cell."""

    num_steps: int
    num_seen: int
    num_mixed: int  # with prompt tokens, and every stream decoding
    num_starts: int  # of the engine, within the cell
    model_error: float | None  # median of |actual / predicted - 1|
    missed: dict[str, int]


class Cell(msgspec.Struct, kw_only=True):
    """One load on one server, or a control without load: `plan` None."""

    plan: CellPlan | None
    num_streams: int
    rounds: tuple[Round, ...]
    prompt_s: tuple[float, ...] = ()  # the same prompt without streams, before and after
    evidence: Evidence | None = None
    reasons: tuple[str, ...] = ()  # why it proves nothing; none: valid
    figures: dict[str, Any] = {}


class ServerRun(msgspec.Struct, kw_only=True):
    """Everything measured on one server."""

    url: str
    label: str
    server: dict[str, Any]  # what it says of itself
    flags: tuple[str, ...] = ()  # if known
    calibration: dict[str, Any] = {}
    ingestion: dict[str, Any] | None = None  # how it computes prompts, if it says so
    controls: list[Cell] = []
    cells: list[Cell] = []


def shown_round(round: Round) -> dict[str, Any]:
    """The round for a file: each stream's first arrival and the gaps after it, in milliseconds."""
    return {
        "settled_ms": _ms(round.settled),
        "ended_ms": _ms(round.ended),
        "lost_at_ms": _ms(round.lost_at),
        "injections": [
            {
                "sent_ms": _ms(injection.sent),
                "first_token_ms": _ms(injection.first_token),
                "prompt_tokens": injection.num_tokens,
                "is_warm_up": injection.is_warm_up,
            }
            for injection in round.injections
        ],
        "streams": [
            {
                "from_ms": _ms(times[0]) if times else None,
                "gaps_ms": [_ms(b - a) for a, b in itertools.pairwise(times)],
            }
            for times in round.streams
        ],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
