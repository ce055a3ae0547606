"""One engine of several that run a model, how many there are, and their figures as of one."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from headrace.engines.client import EngineClient, EngineUp
from headrace_common.messages import Ready, Status

_GROW_AFTER_S = 1.0  # with requests in line and every engine up
_AGAIN_S = 30.0  # after an engine was given up


class Replica:
    """The state of one replica; `up` is None while it is down."""

    def __init__(self, number: int, client: EngineClient) -> None:
        self.number = number
        self.client = client
        self.up: EngineUp | None = None
        self.was_up = asyncio.Event()
        self.emptied = asyncio.Event()  # no place is claimed any more
        self.is_leaving = False  # since it is one too many
        self.status: Status | None = None  # of its engine's present life
        self.num_starts = 0
        self.num_taken = 0  # places that are claimed
        self.rested_at = 0.0  # when it was last seen with something to do

    def came_up(self, news: EngineUp, now: float) -> None:
        self.up, self.status, self.rested_at = news, None, now
        self.num_starts += 1
        self.was_up.set()


@dataclass(slots=True)
class ReplicaCount:
    """Decides how many replicas there are, between `fewest` and `most`. Time is an argument.

    One more starts while requests are in line, and one that had nothing to do for `idle_s` leaves.
    """

    fewest: int
    most: int
    idle_s: float | None = None
    _wanted_since: float | None = None
    _again_at: float = 0.0

    def give_up(self, now: float) -> None:
        """Notes that an engine was given up, so that the next does not start at once."""
        self._again_at = now + _AGAIN_S

    def needs_more(self, now: float, replicas: Sequence[Replica], has_line: bool) -> bool:
        """Whether one more starts now."""
        if not (has_line and all(it.up for it in replicas)):
            self._wanted_since = None
        elif self._wanted_since is None:
            self._wanted_since = now
        is_busy = self._wanted_since is not None and now >= self._wanted_since + _GROW_AFTER_S
        is_low = len(replicas) < self.fewest or (is_busy and len(replicas) < self.most)
        if is_low and now >= self._again_at:
            self._wanted_since = None
            return True
        return False

    def spare(self, now: float, replicas: Sequence[Replica]) -> Replica | None:
        """The replica that leaves next; None if all stay.

        Of too many, one at a time: first of those that are not up, else what has the least to do.
        """
        for it in replicas:
            if it.num_taken:
                it.rested_at = now
        up = [it for it in replicas if it.up]
        if len(replicas) > self.most and up and not any(it.is_leaving for it in replicas):
            return min(reversed(replicas), key=lambda it: (it.up is not None, it.num_taken))
        if self.idle_s is None or len(up) <= self.fewest:
            return None
        idle = (it for it in reversed(up) if not it.num_taken and not it.is_leaving)
        return next((it for it in idle if now >= it.rested_at + self.idle_s), None)


def ready_of(known: Iterable[Ready]) -> Ready:
    """Limits of all of them; of a request those of the smallest, since it may move there."""
    every = tuple(known)
    layouts = [it.layout for it in every]
    layout = msgspec.structs.replace(
        layouts[0],
        num_blocks=sum(it.num_blocks for it in layouts),
        num_slots=sum(it.num_slots for it in layouts),
        num_snapshots=sum(it.num_snapshots for it in layouts),
    )
    num_seqs = sum(it.max_num_seqs for it in every)
    longest = min(it.max_model_len for it in every)
    return msgspec.structs.replace(
        every[0], max_num_seqs=num_seqs, max_model_len=longest, layout=layout
    )


def total(known: Iterable[Status]) -> Status:
    """The sum of their figures, and their queues one behind the other."""
    fields = zip(*map(msgspec.structs.astuple, (_NOTHING, *known)), strict=True)
    return Status(*(reduce(_plus, figures) for figures in fields))


_NOTHING = Status(
    num_running=0, num_waiting=0, num_waiting_tokens=0, blocks_free=0, slots_free=0, num_steps=0
)


def _plus(one: Any, other: Any) -> Any:
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other


def counts_of(life: Status) -> Status:
    """The counts of an engine that has died, kept so that totals never go back."""
    states = {name: getattr(_NOTHING, name) for name in _STATES}
    return msgspec.structs.replace(life, **states)


_STATES = (
    *("num_running", "num_waiting", "num_waiting_tokens", "blocks_free", "slots_free"),
    *("queue", "prompt_tokens_per_s", "steps"),
)
"""Figures of a status that are no counts: they are of a moment."""
