"""Decides how many replicas a model has, and sums up their limits and figures."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from headrace.engines.client import EngineClient, EngineUp
from headrace_common.messages import Ready, Status

# Seconds for which requests have to wait, while all engines are up, before another replica starts.
_GROW_AFTER_S = 1.0
# Seconds between giving up on an engine and starting its replacement.
_RETRY_AFTER_S = 30.0


class Replica:
    """The state of one replica; `up` is None while its engine is down."""

    def __init__(self, number: int, client: EngineClient) -> None:
        self.number = number
        self.client = client
        self.up: EngineUp | None = None
        # Set when the engine has come up, was given up, or is closed.
        self.settled = asyncio.Event()
        # Set when no sequence slot of the replica is reserved any more.
        self.emptied = asyncio.Event()
        # Set when the replica has been chosen to be removed.
        self.is_leaving = False
        # The latest status report since the engine's last start.
        self.status: Status | None = None
        self.num_starts = 0
        self.num_taken = 0  # number of reserved sequence slots
        # The time when the replica came up, or the last time when the replica had requests.
        self.rested_at = 0.0

    def came_up(self, news: EngineUp, now: float) -> None:
        self.up, self.status, self.rested_at = news, None, now
        self.num_starts += 1
        self.settled.set()

    def show(self, status: Status) -> None:
        """Store the latest status report of the replica's engine."""
        self.status = status

    def went_down(self) -> Status | None:
        """Record that the engine is gone; return the engine's last status report."""
        last, self.up, self.status = self.status, None, None
        return last

    def take(self, num_places: int) -> None:
        """Store the number of reserved sequence slots."""
        self.num_taken = num_places

    def leave(self) -> None:
        """Record that the replica will be removed."""
        self.is_leaving = True

    def stay(self) -> None:
        """Record that the replica will not be removed, because no other engine could start."""
        self.is_leaving = False


@dataclass(slots=True)
class ReplicaCount:
    """Decides how many replicas a model has, between `fewest` and `most`. Time is an argument.

    Another replica starts when requests have to wait. A replica that had no request for `idle_s`
    seconds is removed.
    """

    fewest: int
    most: int
    idle_s: float | None = None
    _queued_since: float | None = None
    _retry_at: float = 0.0

    def limit(self, fewest: int, most: int) -> None:
        """Set the smallest and the largest number of replicas."""
        self.fewest, self.most = fewest, most

    def give_up(self, now: float) -> None:
        """Record that an engine was given up. No new engine starts for `_RETRY_AFTER_S` seconds."""
        self._retry_at = now + _RETRY_AFTER_S

    def needs_more(self, now: float, replicas: Sequence[Replica], has_queue: bool) -> bool:
        """Return whether another replica should start now."""
        if not (has_queue and all(it.up for it in replicas)):
            self._queued_since = None
        elif self._queued_since is None:
            self._queued_since = now
        is_busy = self._queued_since is not None and now >= self._queued_since + _GROW_AFTER_S
        is_low = len(replicas) < self.fewest or (is_busy and len(replicas) < self.most)
        if is_low and now >= self._retry_at:
            self._queued_since = None
            return True
        return False

    def spare(self, now: float, replicas: Sequence[Replica]) -> Replica | None:
        """Return the replica to remove next, or None to keep all replicas.

        Replicas above the maximum `most` are removed one at a time. Replicas whose engine is down
        come first, then the least busy replica. Otherwise a replica is removed after `idle_s`
        idle seconds.
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
    """Combine the limits of all replicas.

    Numbers of sequences, blocks and slots are added up. `max_model_len` is the smallest limit of
    all replicas, since a request may move to any replica.
    """
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
    """Add up the numbers in the replicas' status reports, and concatenate the queues."""
    fields = zip(*map(msgspec.structs.astuple, (NOTHING, *known)), strict=True)
    return Status(*(reduce(_plus, figures) for figures in fields))


NOTHING = Status(
    num_running=0, num_waiting=0, num_waiting_tokens=0, blocks_free=0, slots_free=0, num_steps=0
)


def _plus(one: Any, other: Any) -> Any:
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other


def counts_of(status: Status) -> Status:
    """Keep only the counters in the status of a dead engine, so that totals never decrease."""
    states = {name: getattr(NOTHING, name) for name in _STATES}
    return msgspec.structs.replace(status, **states)


_STATES = (
    *("num_running", "num_waiting", "num_waiting_tokens", "blocks_free", "slots_free"),
    *("queue", "prompt_tokens_per_s", "steps"),
)
"""Fields of a status that describe the present, unlike counters."""
