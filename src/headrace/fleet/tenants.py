"""Streams and batches of vectors as an engine's tenants: whose its sequences are, what it tells."""

import asyncio
import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from headrace.engines.client import EngineClient, EngineDown, EngineUp
from headrace.fleet.load_watch import LoadWatch
from headrace.fleet.queue_eta import QueueEta, TokensAsked
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

_GONE = RequestError("engine_failed", "The engine stopped and could not be restarted.")
_NO_ENGINE = EngineDown("engine_failed", "", given_up=False)
_TELL_LOAD_S = 1.0  # at most as often do waiters hear of the load

Item = Started | PromptAdvance | PromptLogprobs | Guessed | NewToken | Finished
"""News from an engine about one sequence."""


class InQueue(msgspec.Struct, frozen=True):
    """Where a tenant stands in the engine's queue; 1 is next."""

    position: int
    waiting: int
    eta_ms: int | None


TenantNews = list[Item] | EngineUp | EngineDown | InQueue
"""News that a tenant acts on, in order."""


class Tenant(Protocol):
    """A stream, or a batch of inputs that become vectors."""

    def begin(self, model: ServedModel, engine: "Tenants", up: EngineUp) -> None:
        """An engine is there: submits to it what is left to do."""

    def tell(self, news: TenantNews) -> None:
        """Hands over what the engine said, or what became of it."""

    def tell_place(self, place: InQueue) -> None:
        """Hands over where it stands in the queue."""

    def lose(self, error: RequestError) -> None:
        """The engine was given up."""

    def asked(self, sequence_id: SequenceId) -> TokensAsked:
        """The tokens that one of its sequences asks of the engine."""


class Waiter(Protocol):
    """A tenant to be, which waits for its model."""

    def tell_load(self, progress: float | None, stage: str) -> None:
        """How far the load is; None: not known yet. And what it does, in words."""


class Tenants:
    """The tenants of a model, and whose each sequence is: deals out what the engine says.

    Ids are never used twice, so what a dead engine said cannot reach a later submission.
    """

    def __init__(self, loading: LoadWatch) -> None:
        self.eta = QueueEta()
        self._uncounted: list[Outputs] = []  # not yet part of the forecast
        self._loading = loading
        self._client: EngineClient | None = None  # from its first coming up to its end
        self._begun: tuple[ServedModel, EngineUp] | None = None  # while it is up
        self._numbers = itertools.count()
        self._owners: dict[SequenceId, Tenant] = {}
        self._tenants: dict[Tenant, None] = {}  # in the order in which they came
        self._waiters: dict[Waiter, None] = {}
        self._told_load_at = -math.inf
        self._readings: dict[str, asyncio.Future[AdapterRead]] = {}  # by fingerprint

    def __iter__(self) -> Iterator[Tenant]:
        """The tenants, in the order in which they were added."""
        return iter(list(self._tenants))

    def add(self, tenant: Tenant) -> None:
        """Adds a tenant, which begins now and on each later engine, until it is removed."""
        self._tenants[tenant] = None
        if self._begun is None:
            tenant.tell(_NO_ENGINE)
        else:
            model, up = self._begun
            tenant.begin(model, self, up)

    def remove(self, tenant: Tenant) -> None:
        self._tenants.pop(tenant, None)

    @contextlib.contextmanager
    def telling(self, waiter: Waiter) -> Iterator[None]:
        """Tells it of the load that it waits for, until the context is left."""
        self._waiters[waiter] = None
        if self._client is None:
            waiter.tell_load(self._loading.share, self._loading.stage)
        try:
            yield
        finally:
            del self._waiters[waiter]

    # what a tenant asks of the engine

    def open(self, tenant: Tenant) -> SequenceId:
        """A new sequence of this tenant."""
        sequence_id = SequenceId(next(self._numbers))
        self._owners[sequence_id] = tenant
        return sequence_id

    def submit(self, submit: Submit) -> None:
        if self._client is not None:
            self._client.submit(submit)

    def cancel(self, cancel: Cancel) -> None:
        if self._client is not None:
            self._client.cancel(cancel)

    async def read_adapter(self, adapter: Adapter) -> None:
        """Has the engine read it; ModelError says why it cannot."""
        if self._client is None or self._begun is None:
            raise _GONE.with_traceback(None)
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
        """No stream uses it any more."""
        if self._client is not None:
            self._client.adapt(DropAdapter(adapter.fingerprint))

    def has_read(self, answer: AdapterRead) -> None:
        """The engine has read an adapter, asked to or because a request named it."""
        reading = self._readings.get(answer.fingerprint)
        if reading is not None and not reading.done():
            reading.set_result(answer)

    def _stop_reading(self) -> None:
        for reading in self._readings.values():
            if not reading.done():
                reading.set_exception(_GONE.with_traceback(None))

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forgets these sequences: news about them reaches nobody from now on."""
        for sequence_id in sequence_ids:
            self._owners.pop(sequence_id, None)

    # what becomes of the engine

    def begin(self, model: ServedModel, client: EngineClient, up: EngineUp) -> None:
        """The engine has come up: all submit to it."""
        self._client = client
        self.resize(model, up)
        for tenant in self:
            tenant.begin(model, self, up)

    def resize(self, model: ServedModel, up: EngineUp) -> None:
        """The engine has other limits for those who come."""
        self._begun = model, up

    def move(self, news: EngineDown, lost: Iterable[SequenceId]) -> None:
        """One of several engines is gone; another takes what it had."""
        assert self._begun is not None
        self._stop_reading()  # the others may have come up after it was asked
        self._count()
        self.eta.forget(lost)
        for owner in filter(None, dict.fromkeys(map(self._owners.get, lost))):
            owner.tell(news)
            owner.tell(self._begun[1])

    def pause(self, news: EngineDown) -> None:
        """The engine has died; another one comes unless it was given up."""
        self._begun = None
        self._stop_reading()
        self._count()
        self.eta.forget_running()
        for tenant in self:
            if news.given_up:
                tenant.lose(_GONE)
            else:
                tenant.tell(news)

    def end(self) -> None:
        """The engine has ended."""
        self._client = self._begun = None
        self._stop_reading()
        self._count()
        self.eta.forget_running()

    # what the engine says

    def deliver(self, outputs: Outputs) -> None:
        """Gives each tenant the news of its own sequences, in order."""
        self._uncounted.append(outputs)  # until the next status renews the forecast
        by_tenant: defaultdict[Tenant, list[Item]] = defaultdict(list)
        for items in (
            outputs.started,
            outputs.prompt_logprobs,
            outputs.progress,
            outputs.guessed,
            outputs.tokens,
            outputs.finished,
        ):
            for item in items:
                if (tenant := self._owners.get(item.sequence_id)) is not None:
                    by_tenant[tenant].append(item)
        for tenant, mine in by_tenant.items():
            tenant.tell(mine)

    def tell_load(self, now: float) -> None:
        """Tells those who wait for it how far the load is, unless they have just heard."""
        if now >= self._told_load_at + _TELL_LOAD_S:
            self._told_load_at = now
            for waiter in list(self._waiters):
                waiter.tell_load(self._loading.share, self._loading.stage)

    def tell_places(self, status: Status, now: float) -> None:
        """Tells every tenant in the queue its first place there, and when its turn may come."""
        self._count()
        self.eta.measure_pace(status, now)
        if self._begun is None:
            return
        self.eta.foresee(status, self._begun[1].ready, self._asked, now)
        told: set[Tenant] = set()
        for position, id in enumerate(status.queue, 1):
            tenant = self._owners.get(id)
            if tenant is not None and tenant not in told:
                told.add(tenant)
                wait_s = self.eta.schedule.start(position).in_s
                eta_ms = None if wait_s is None else int(wait_s * 1000)
                tenant.tell_place(InQueue(position, status.num_waiting, eta_ms))

    def _count(self) -> None:
        self.eta.hear(*self._uncounted)
        self._uncounted.clear()

    def _asked(self, sequence_id: SequenceId) -> TokensAsked:
        tenant = self._owners.get(sequence_id)
        return tenant.asked(sequence_id) if tenant else TokensAsked(0, 0)
