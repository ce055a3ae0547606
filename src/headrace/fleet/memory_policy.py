"""Decides which models are in memory, and queues requests in order of arrival. Pure: no clock."""

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, NamedTuple, TypeVar


class Stage(Enum):
    """The state of a model's weights in memory."""

    OUT = "out"
    LOADING = "loading"
    IN = "in"
    LEAVING = "leaving"


Ticket = TypeVar("Ticket", bound=Hashable)


class Move(NamedTuple, Generic[Ticket]):
    """An action for the owner of the policy. Only the kinds `enter` and `refuse` have a ticket."""

    kind: Literal["load", "unload", "enter", "refuse"]
    model: str
    ticket: Ticket | None = None


@dataclass
class _Model:
    size: int  # bytes
    stage: Stage = Stage.OUT
    num_uses: int = 0
    # The number of the model's last use. All models share one counter of uses.
    used: int = 0
    must_leave: bool = False

    @property
    def is_idle(self) -> bool:
        return self.stage is Stage.IN and self.num_uses == 0


class MemoryPolicy(Generic[Ticket]):
    """Decides which models are loaded and unloaded.

    The owner reports each event, and then carries out the moves from `next_move` until
    `next_move` returns None. A ticket stands for a request that waits. The ticket enters when the
    request may use the model.

    All models share one queue, so that the waiting is fair. While the first ticket waits for
    memory, no later ticket enters. So the models in memory become idle, and the least recently
    used model is unloaded.
    """

    def __init__(self, max_models: int | None = None, max_bytes: int | None = None) -> None:
        self._max_models = max_models
        self._max_bytes = max_bytes
        self._models: dict[str, _Model] = {}
        # The queued tickets in order of arrival, each with the name of the ticket's model.
        self._queue: dict[Ticket, str] = {}
        self._uses = itertools.count(1)

    def limit(self, max_models: int | None, max_bytes: int | None) -> None:
        """Set the maximum number of models in memory, and their maximum total size in bytes."""
        self._max_models, self._max_bytes = max_models, max_bytes

    def add(self, model: str, size: int) -> None:
        """Add a model with its size in bytes, or change the size of an existing model."""
        self._models.setdefault(model, _Model(size)).size = size

    def remove(self, model: str) -> None:
        """Forget a model that is not in memory."""
        assert self._models.pop(model).stage is Stage.OUT

    def stage(self, model: str) -> Stage:
        return self._models[model].stage

    def enter(self, model: str) -> bool:
        """Count a use and return True if no ticket waits and the model stays in memory."""
        entry = self._models[model]
        if self._queue or entry.stage is not Stage.IN or entry.must_leave:
            return False
        self.hold(model)
        return True

    def ask(self, model: str, ticket: Ticket) -> None:
        """Queue a ticket. The later move `enter` counts a use of the model for this ticket."""
        self._queue[ticket] = model

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket from the queue, if the ticket is still queued."""
        self._queue.pop(ticket, None)

    def hold(self, model: str) -> None:
        """Count a use of the model immediately, even if the model is not in memory."""
        entry = self._models[model]
        entry.num_uses += 1
        entry.used = next(self._uses)

    def release(self, model: str) -> None:
        """End a use."""
        entry = self._models[model]
        assert entry.num_uses > 0
        entry.num_uses -= 1
        entry.used = next(self._uses)

    def unload_when_idle(self, model: str) -> None:
        """Unload a model once it is idle.

        A ticket that waits for the model will load the model again.
        """
        if self._models[model].stage is Stage.IN:
            self._models[model].must_leave = True

    def loaded(self, model: str) -> None:
        """Record that the model is in memory now, as the move `load` demanded."""
        entry = self._models[model]
        entry.stage, entry.used = Stage.IN, next(self._uses)

    def lost(self, model: str) -> list[Ticket]:
        """Record a failed load or a dead engine; remove and return the model's tickets."""
        entry = self._models[model]
        entry.stage, entry.must_leave = Stage.OUT, False
        return self.remove_tickets(model)

    def remove_tickets(self, model: str) -> list[Ticket]:
        """Remove all tickets that wait for a model from the queue, and return these tickets."""
        tickets = self.waiting(model)
        for ticket in tickets:
            del self._queue[ticket]
        return tickets

    @property
    def num_waiting(self) -> int:
        """The number of tickets that wait for any model."""
        return len(self._queue)

    def waiting(self, model: str | None = None) -> list[Ticket]:
        """Return the tickets that wait for this model; without a model, return all tickets."""
        return [ticket for ticket, wanted in self._queue.items() if model in (wanted, None)]

    def is_used(self, model: str) -> bool:
        """Return whether the model has uses. The model's stage does not matter."""
        return self._models[model].num_uses > 0

    def is_gone(self, model: str) -> bool:
        """Return whether the model is not in memory and has no uses."""
        entry = self._models[model]
        return entry.stage is Stage.OUT and entry.num_uses == 0

    def unloaded(self, model: str) -> None:
        """Record that the model has left memory, as the move `unload` demanded."""
        entry = self._models[model]
        entry.stage, entry.must_leave = Stage.OUT, False

    def idle(self) -> list[tuple[str, int]]:
        """Return the idle models that no ticket waits for, each with the number of its last use."""
        wanted = set(self._queue.values())
        entries = self._models.items()
        return [(name, it.used) for name, it in entries if it.is_idle and name not in wanted]

    def next_move(self) -> Move[Ticket] | None:
        """Return the next action, or None if there is nothing to do.

        Each action is returned only once: the policy assumes that the caller carries out the
        action.

        Models that have to leave memory are unloaded first. Then the queue is scanned in order. A
        ticket enters if its model is in memory. A ticket is skipped if its model is loading or
        leaving, since no decision about the ticket is needed now. The scan stops at the first
        ticket whose model is unloaded, even if the result is None. Otherwise later tickets could
        keep other models busy, and the first ticket would never get their memory.
        """
        for name, entry in self._models.items():
            if entry.must_leave and entry.is_idle:
                entry.stage = Stage.LEAVING
                return Move("unload", name)
        for ticket, name in self._queue.items():
            entry = self._models[name]
            if entry.stage is Stage.IN and not entry.must_leave:
                del self._queue[ticket]
                self.hold(name)
                return Move("enter", name, ticket)
            if entry.stage is Stage.OUT:
                return self._make_room(ticket, name)
            # The model is loading or leaving, so this ticket waits. Later tickets may still enter.
        return None

    def _make_room(self, ticket: Ticket, name: str) -> Move[Ticket] | None:
        entry = self._models[name]
        if not self._fits([entry]):
            del self._queue[ticket]
            return Move("refuse", name, ticket)
        present = [it for it in self._models.values() if it.stage is not Stage.OUT]
        if self._fits([*present, entry]):
            entry.stage = Stage.LOADING
            return Move("load", name)
        staying = [it for it in present if it.stage is not Stage.LEAVING]
        if self._fits([*staying, entry]):
            # There is enough room once the leaving models have been unloaded.
            return None
        victim = min(
            (one for one, it in self._models.items() if it.is_idle),
            key=lambda one: self._models[one].used,
            default=None,
        )
        if victim is None:
            return None
        self._models[victim].stage = Stage.LEAVING
        return Move("unload", victim)

    def _fits(self, entries: Iterable[_Model]) -> bool:
        sizes = [entry.size for entry in entries]
        are_few_enough = self._max_models is None or len(sizes) <= self._max_models
        return are_few_enough and (self._max_bytes is None or sum(sizes) <= self._max_bytes)
