"""Connects streams and embedding requests with the engine of a model."""

import asyncio
import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from headrace.engines.client import EngineClient, EngineDown, EngineUp
from headrace.fleet.load_progress import LoadProgressWatch
from headrace.fleet.queue_eta import QueueEta, TokenDemand
from headrace.fleet.served_model import ServedModel
from headrace_common.adapter import Adapter
from headrace_common.errors import ModelError, RequestError
from headrace_common.ids import SequenceId
from headrace_common.messages import (
    AdapterRead,
    Cancel,
    DropAdapter,
    Finished,
    Guessed,
    LoadAdapter,
    NewToken,
    Outputs,
    PromptAdvance,
    PromptLogprobs,
    Started,
    Status,
    Submit,
)

_GIVEN_UP = RequestError("engine_failed", "The engine stopped and could not be restarted.")
_NO_ENGINE = EngineDown("engine_failed", "", given_up=False)
# Minimum interval between load reports to waiting clients, in seconds.
_LOAD_REPORT_S = 1.0

Item = Started | PromptAdvance | PromptLogprobs | Guessed | NewToken | Finished
"""A message from the engine about one sequence."""


class InQueue(msgspec.Struct, frozen=True):
    """A user's position in the engine's queue, where 1 is the next request.

    Also has the queue's length and the expected wait.
    """

    position: int
    waiting: int
    eta_ms: int | None


UserNews = list[Item] | EngineUp | EngineDown | InQueue
"""A message to a user of the engine; each user gets all messages in order."""


class EngineUser(Protocol):
    """A stream or an embedding request that has sequences in the engine."""

    def begin(self, model: ServedModel, engine: "EngineUsers", up: EngineUp) -> None:
        """Submit the user's unfinished sequences to an engine that has come up."""

    def tell(self, news: UserNews) -> None:
        """Handle a message about this user's sequences or about the engine's state."""

    def set_queue_position(self, place: InQueue) -> None:
        """Handle a new position in the engine's queue."""

    def lose(self, error: RequestError) -> None:
        """End this user's request with the error, since the engine was given up."""

    def asked(self, sequence_id: SequenceId) -> TokenDemand:
        """Return a sequence's prompt length and the limit of the answer's length, in tokens."""


class Waiter(Protocol):
    """A request that waits for its model to load."""

    def set_load_progress(self, progress: float | None, stage: str) -> None:
        """Report the load's stage, and the loaded share of the weights (None if unknown)."""


class EngineUsers:
    """Tracks which user owns each sequence, and delivers the engine's messages to the users.

    Sequence ids are never used twice. So a late message of a dead engine cannot reach the owner
    of a newer sequence.
    """

    def __init__(self, loading: LoadProgressWatch) -> None:
        self.eta = QueueEta()
        # Outputs that the estimate of waiting times (`eta`) has not processed yet.
        self._unread_outputs: list[Outputs] = []
        self._loading = loading
        # Set from the engine's first start until the engine's final end, also during restarts.
        self._client: EngineClient | None = None
        # Set while the engine is up.
        self._current: tuple[ServedModel, EngineUp] | None = None
        self._numbers = itertools.count()
        self._owners: dict[SequenceId, EngineUser] = {}
        # The users, oldest first. The dict serves as an ordered set.
        self._users: dict[EngineUser, None] = {}
        self._waiters: dict[Waiter, None] = {}
        self._load_reported_at = -math.inf
        # Pending reads of adapters. The keys are the fingerprints of the adapters.
        self._readings: dict[str, asyncio.Future[AdapterRead]] = {}

    def __iter__(self) -> Iterator[EngineUser]:
        """Iterate over the users, oldest first."""
        return iter(list(self._users))

    def add(self, user: EngineUser) -> None:
        """Add a user.

        The user's `begin` is called for the current engine and for each later engine.
        """
        self._users[user] = None
        if self._current is None:
            user.tell(_NO_ENGINE)
        else:
            model, up = self._current
            user.begin(model, self, up)

    def remove(self, user: EngineUser) -> None:
        self._users.pop(user, None)

    @contextlib.contextmanager
    def telling(self, waiter: Waiter) -> Iterator[None]:
        """Report the load's progress to a waiter until the context ends."""
        self._waiters[waiter] = None
        if self._client is None:
            waiter.set_load_progress(self._loading.share, self._loading.stage)
        try:
            yield
        finally:
            del self._waiters[waiter]

    # Methods that the engine's users call:

    def open(self, user: EngineUser) -> SequenceId:
        """Create a new sequence id, and record the user as the owner of the sequence."""
        sequence_id = SequenceId(next(self._numbers))
        self._owners[sequence_id] = user
        return sequence_id

    def submit(self, submit: Submit) -> None:
        if self._client is not None:
            self._client.submit(submit)

    def cancel(self, cancel: Cancel) -> None:
        if self._client is not None:
            self._client.cancel(cancel)

    async def read_adapter(self, adapter: Adapter) -> None:
        """Let the engine read an adapter.

        Raises ModelError with the reason if the engine refuses the adapter.
        """
        if self._client is None or self._current is None:
            raise _GIVEN_UP.with_traceback(None)
        own = adapter.fingerprint
        reading = self._readings.setdefault(own, asyncio.get_running_loop().create_future())
        self._client.adapt(LoadAdapter(adapter))
        try:
            answer = await reading
        finally:
            self._readings.pop(own, None)
        if answer.message:
            raise ModelError(answer.message, answer.code)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Let the engine drop an adapter that no stream uses any more."""
        if self._client is not None:
            self._client.adapt(DropAdapter(adapter.fingerprint))

    def has_read(self, answer: AdapterRead) -> None:
        """Handle the engine's report that an adapter was read or refused.

        The engine also sends this report when it reads an adapter for a sequence. If no caller
        waits for the report, it is ignored.
        """
        reading = self._readings.get(answer.fingerprint)
        if reading is not None and not reading.done():
            reading.set_result(answer)

    def _stop_reading(self) -> None:
        for reading in self._readings.values():
            if not reading.done():
                reading.set_exception(_GIVEN_UP.with_traceback(None))

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forget the owners of these sequences; later messages about the sequences are dropped."""
        for sequence_id in sequence_ids:
            self._owners.pop(sequence_id, None)

    # Methods that EngineLife calls when the engine's state changes:

    def begin(self, model: ServedModel, client: EngineClient, up: EngineUp) -> None:
        """Let all users submit their sequences to an engine that has come up."""
        self._client = client
        self.resize(model, up)
        for user in self:
            user.begin(model, self, up)

    def resize(self, model: ServedModel, up: EngineUp) -> None:
        """Store the engine's new limits, which apply to users that are added later."""
        self._current = model, up

    def move(self, news: EngineDown, lost: Iterable[SequenceId]) -> None:
        """Let the owners of a lost replica's sequences submit these sequences to other replicas."""
        assert self._current is not None
        # The lost replica may be the only replica that got a pending request to read an adapter.
        # No replica would answer such a request.
        self._stop_reading()
        self._update_eta()
        self.eta.forget(lost)
        for owner in filter(None, dict.fromkeys(map(self._owners.get, lost))):
            owner.tell(news)
            owner.tell(self._current[1])

    def pause(self, news: EngineDown) -> None:
        """Record that the engine has died.

        The users wait for a restart, or end if the engine was given up.
        """
        self._current = None
        self._stop_reading()
        self._update_eta()
        self.eta.forget_running()
        for user in self:
            if news.given_up:
                user.lose(_GIVEN_UP)
            else:
                user.tell(news)

    def end(self) -> None:
        """Record that the engine has ended and will not restart."""
        self._client = self._current = None
        self._stop_reading()
        self._update_eta()
        self.eta.forget_running()

    # Methods that deliver the engine's messages:

    def deliver(self, outputs: Outputs) -> None:
        """Deliver to each user, in order, the messages about this user's sequences."""
        # The estimate is updated with the next status.
        self._unread_outputs.append(outputs)
        by_user: defaultdict[EngineUser, list[Item]] = defaultdict(list)
        for items in (
            outputs.started,
            outputs.prompt_logprobs,
            outputs.progress,
            outputs.guessed,
            outputs.tokens,
            outputs.finished,
        ):
            for item in items:
                if (user := self._owners.get(item.sequence_id)) is not None:
                    by_user[user].append(item)
        for user, own in by_user.items():
            user.tell(own)

    def set_load_progress(self, now: float) -> None:
        """Report the load's progress to all waiters, at most once every `_LOAD_REPORT_S`
        seconds.
        """
        if now >= self._load_reported_at + _LOAD_REPORT_S:
            self._load_reported_at = now
            for waiter in list(self._waiters):
                waiter.set_load_progress(self._loading.share, self._loading.stage)

    def report_positions(self, status: Status, now: float) -> None:
        """Report queue positions and expected starts to the users.

        Each queued user gets the position and the expected start of the user's first queued
        sequence.
        """
        self._update_eta()
        self.eta.measure_pace(status, now)
        if self._current is None:
            return
        self.eta.update_schedule(status, self._current[1].ready, self._demand_of, now)
        reported: set[EngineUser] = set()
        for position, id in enumerate(status.queue, 1):
            user = self._owners.get(id)
            if user is not None and user not in reported:
                reported.add(user)
                wait_s = self.eta.schedule.start(position).in_s
                eta_ms = None if wait_s is None else int(wait_s * 1000)
                user.set_queue_position(InQueue(position, status.num_waiting, eta_ms))

    def _update_eta(self) -> None:
        self.eta.hear(*self._unread_outputs)
        self._unread_outputs.clear()

    def _demand_of(self, sequence_id: SequenceId) -> TokenDemand:
        user = self._owners.get(sequence_id)
        return user.asked(sequence_id) if user else TokenDemand(0, 0)
