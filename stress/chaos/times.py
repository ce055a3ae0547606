"""Measures how long streams were silent, and how soon after a death they continued."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from stress.http import Exchange
from stress.site import Death
from stress.story import Story

Lags = Sequence[tuple[float, float]]
"""Pairs: a time at which the proxy was late, and the delay in seconds."""

# A killed process's output may arrive up to this many seconds after its death.
_IN_FLIGHT_S = 0.2


class Gap(NamedTuple):
    """A silence in seconds, without the time during which the proxy itself was late."""

    seconds: float
    began: float


def longest_gap(made: Exchange, lags: Lags) -> Gap:
    """Return the longest time without a byte on the open connection, after the response's head."""
    passage = made.passage
    if passage is None or passage.fate.num_slow or not _is_stream(made):
        return Gap(0.0, 0.0)
    times = [at for at, _ in passage.arrivals]
    if not made.got.is_whole:
        times.append(made.ended)
    at, later = max(pairwise(times), key=lambda pair: pair[1] - pair[0], default=(0.0, 0.0))
    return Gap(later - at - _late(at, later, lags), at)


def _late(began: float, ended: float, lags: Lags) -> float:
    overlaps = (min(at, ended) - max(at - lag, began) for at, lag in lags)
    return sum(overlap for overlap in overlaps if overlap > 0)


def _is_stream(made: Exchange) -> bool:
    return made.said.headers.get("content-type", "").startswith("text/event-stream")


def token_times(story: Story) -> list[float]:
    """Return the sorted times at which the proxy saw tokens of this request's streams."""
    return sorted(at for made in story.exchanges for at in _tokens(made))


def resume_times(times: Sequence[float], deaths: Sequence[Death]) -> Iterator[tuple[str, float]]:
    """For each death during a stream, yield what died and the seconds until the next token."""
    for death in deaths:
        if times and times[0] < death.at:
            later = [at for at in times if at > death.at + _IN_FLIGHT_S]
            if later:
                yield death.what, later[0] - death.at


def _tokens(made: Exchange) -> Iterator[float]:
    if made.passage is None:
        return
    start = 0
    for at, end in made.passage.arrivals:
        piece = made.passage.answer[start:end]
        if b'"token_ids":[' in piece or b'"ids":[' in piece:
            yield at
        start = end
