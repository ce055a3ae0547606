"""Streams and batches of vectors as an engine's tenants: whose its sequences are, what it tells."""

import itertools
from collections.abc import Iterable
from typing import Protocol

import msgspec

from headrace.core.errors import RequestError
from headrace.core.ids import SequenceId
from headrace.core.messages import (
    Cancel,
    Finished,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    Started,
    Submit,
)
from headrace.engine.client import EngineDown, EngineUp
from headrace.fleet.queue_eta import TokensAsked
from headrace.fleet.served_model import ServedModel

Item = Started | PromptAdvance | PromptLogprobs | NewToken | Finished
"""News from an engine about one sequence."""


class InQueue(msgspec.Struct, frozen=True):
    """Where a tenant stands in the engine's queue; 1 is next."""

    position: int
    waiting: int
    eta_ms: int | None


TenantNews = list[Item] | EngineUp | EngineDown | InQueue
"""News that a tenant acts on, in order."""


class Seat(Protocol):
    """The part of a model's host that its tenants use."""

    def open(self, tenant: "Tenant") -> SequenceId: ...

    def submit(self, submit: Submit) -> None: ...

    def cancel(self, cancel: Cancel) -> None: ...

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None: ...


class Tenant(Protocol):
    """A stream, or a batch of inputs that become vectors."""

    def begin(self, model: ServedModel, seat: Seat, up: EngineUp) -> None:
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

    def tell_load(self, progress: float | None) -> None:
        """How far the load is; None: not known yet."""


class Sequences:
    """The tenant that each of an engine's sequences belongs to.

    Ids are never used twice, so what a dead engine said cannot reach a later submission.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._owners: dict[SequenceId, Tenant] = {}

    def open(self, owner: Tenant) -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        self._owners[sequence_id] = owner
        return sequence_id

    def close(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._owners.pop(sequence_id, None)

    def owner(self, sequence_id: SequenceId) -> Tenant | None:
        return self._owners.get(sequence_id)
