"""The record of a measurement: the prompts sent, and the arrival time of every token."""

import itertools
from typing import Any

import msgspec


class CellPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One load: prompts of one length, sent at one rate while streams run."""

    name: str
    prompt_tokens: int
    # Seconds from one prompt to the next.
    interval_s: float
    # True if prompts arrive at random (a Poisson process), `interval_s` apart on average.
    is_random: bool = False
    num_warm_up: int
    num_measured: int


class Injection(msgspec.Struct, frozen=True):
    """A prompt sent while streams run. Times are seconds since the start of the cell."""

    sent: float
    # None if the first token did not arrive while the streams ran.
    first_token: float | None
    num_tokens: int
    is_warm_up: bool


class Round(msgspec.Struct, frozen=True):
    """One run of the streams, and the prompts sent meanwhile.

    Times are seconds since the start of the cell.
    """

    # The time from which all streams were running.
    settled: float
    ended: float
    streams: tuple[tuple[float, ...], ...]  # arrival times of each stream's tokens
    injections: tuple[Injection, ...] = ()
    # The time at which a stream ended unexpectedly.
    lost_at: float | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Counts from the server's reports about its steps during a cell."""

    num_steps: int
    num_seen: int
    # The number of steps that had prompt tokens and in which every stream got a token.
    num_mixed: int
    num_starts: int  # number of engine starts within the cell
    model_error: float | None  # median of |actual / predicted - 1|
    missed: dict[str, int]


class Cell(msgspec.Struct, kw_only=True):
    """One load on one server. A control, which has no load, has no plan."""

    plan: CellPlan | None
    num_streams: int
    rounds: tuple[Round, ...]
    # Seconds for the same prompt on the idle server, before and after the cell.
    prompt_s: tuple[float, ...] = ()
    evidence: Evidence | None = None
    # Reasons why the cell is not valid; empty for a valid cell.
    reasons: tuple[str, ...] = ()
    figures: dict[str, Any] = {}

    def doubt(self, *reasons: str) -> None:
        """Mark the cell as not valid for these reasons."""
        self.reasons += reasons


class ServerRun(msgspec.Struct, kw_only=True):
    """Everything that was measured on one server."""

    url: str
    label: str
    server: dict[str, Any]  # the server's description of itself
    flags: tuple[str, ...] = ()  # flags of the server, if given
    calibration: dict[str, Any] = {}
    ingestion: dict[str, Any] | None = None  # the server's description of how it processes prompts
    controls: list[Cell] = []
    cells: list[Cell] = []


def shown_round(round: Round) -> dict[str, Any]:
    """Return the round for a file, in milliseconds: each stream's first arrival and gaps."""
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
