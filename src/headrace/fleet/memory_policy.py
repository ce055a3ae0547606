"""The models in memory, and who waits for one: first come, first served. Knows no clock."""

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, NamedTuple, TypeVar


class Stage(Enum):
    """The place of a model's weights."""

    OUT = "out"
    LOADING = "loading"
    IN = "in"
    LEAVING = "leaving"


Ticket = TypeVar("Ticket", bound=Hashable)


class Move(NamedTuple, Generic[Ticket]):
    """The next action of the owner; `ticket` is None but for `enter` and `refuse`."""

    kind: Literal["load", "unload", "enter", "refuse"]
    model: str
    ticket: Ticket | None = None


@dataclass
class _Place:
    size: int  # bytes
    stage: Stage = Stage.OUT
    num_uses: int = 0
    used: int = 0  # when it was last used, as a count of uses
    must_leave: bool = False

    @property
    def is_idle(self) -> bool:
        return self.stage is Stage.IN and self.num_uses == 0


class Residency(Generic[Ticket]):
    """Ask, leave and release as things happen, then do what `next_move` says until it is None.

    One line for all models keeps it fair: behind a ticket that waits for memory nobody enters, so
    the models in use come to rest, and the one that was used least recently makes room.
    """

    def __init__(self, max_models: int | None = None, max_bytes: int | None = None) -> None:
        self._max_models = max_models
        self._max_bytes = max_bytes
        self._places: dict[str, _Place] = {}
        self._line: dict[Ticket, str] = {}  # in order, and the model that each waits for
        self._uses = itertools.count(1)

    def limit(self, max_models: int | None, max_bytes: int | None) -> None:
        """Sets how many models, and how much of them, may be in from now on."""
        self._max_models, self._max_bytes = max_models, max_bytes

    def add(self, model: str, size: int) -> None:
        """Makes a model known, or its size."""
        self._places.setdefault(model, _Place(size)).size = size

    def remove(self, model: str) -> None:
        """Forgets a model that is out."""
        assert self._places.pop(model).stage is Stage.OUT

    def stage(self, model: str) -> Stage:
        return self._places[model].stage

    def enter(self, model: str) -> bool:
        """Begin a use if the model is in memory to stay and no ticket waits, else return False."""
        place = self._places[model]
        if self._line or place.stage is not Stage.IN or place.must_leave:
            return False
        self.hold(model)
        return True

    def ask(self, model: str, ticket: Ticket) -> None:
        """Puts a ticket in line; `next_move` says when it enters, which counts as a use."""
        self._line[ticket] = model

    def leave(self, ticket: Ticket) -> None:
        """Gives up waiting; nothing if it has entered."""
        self._line.pop(ticket, None)

    def hold(self, model: str) -> None:
        """A use begins unasked, of a model that is in or will be."""
        place = self._places[model]
        place.num_uses += 1
        place.used = next(self._uses)

    def release(self, model: str) -> None:
        """A use ends."""
        place = self._places[model]
        assert place.num_uses > 0
        place.num_uses -= 1
        place.used = next(self._uses)

    def send_out(self, model: str) -> None:
        """Lets a model leave once it is idle. Tickets taken meanwhile wait, and bring it back."""
        if self._places[model].stage is Stage.IN:
            self._places[model].must_leave = True

    def loaded(self, model: str) -> None:
        """The move `load` is done."""
        place = self._places[model]
        place.stage, place.used = Stage.IN, next(self._uses)

    def lost(self, model: str) -> list[Ticket]:
        """The load failed, or the engine is gone for good; the tickets that waited for it."""
        place = self._places[model]
        place.stage, place.must_leave = Stage.OUT, False
        return self.send_away(model)

    def send_away(self, model: str) -> list[Ticket]:
        """The tickets that wait for it, which wait no longer."""
        tickets = self.waiting(model)
        for ticket in tickets:
            del self._line[ticket]
        return tickets

    def waiting(self, model: str | None = None) -> list[Ticket]:
        """The tickets that wait for it, or for any."""
        return [ticket for ticket, wanted in self._line.items() if model in (wanted, None)]

    def is_used(self, model: str) -> bool:
        """Whether somebody holds it, wherever it is."""
        return self._places[model].num_uses > 0

    def is_gone(self, model: str) -> bool:
        """Whether the model is out, and nobody holds it."""
        place = self._places[model]
        return place.stage is Stage.OUT and place.num_uses == 0

    def unloaded(self, model: str) -> None:
        """The move `unload` is done."""
        place = self._places[model]
        place.stage, place.must_leave = Stage.OUT, False

    def idle(self) -> list[tuple[str, int]]:
        """Models that are in and that nobody uses or waits for, and a number for their last use."""
        wanted = set(self._line.values())
        places = self._places.items()
        return [(name, it.used) for name, it in places if it.is_idle and name not in wanted]

    def next_move(self) -> Move[Ticket] | None:
        """The next action; its effect on the books is taken at once, so each is returned once."""
        for name, place in self._places.items():
            if place.must_leave and place.is_idle:
                place.stage = Stage.LEAVING
                return Move("unload", name)
        for ticket, name in self._line.items():
            place = self._places[name]
            if place.stage is Stage.IN and not place.must_leave:
                del self._line[ticket]
                self.hold(name)
                return Move("enter", name, ticket)
            if place.stage is Stage.OUT:
                return self._make_room(ticket, name)
            # loading or leaving, it has its place, or will: others need not wait for it
        return None

    def _make_room(self, ticket: Ticket, name: str) -> Move[Ticket] | None:
        place = self._places[name]
        if not self._fits([place]):
            del self._line[ticket]
            return Move("refuse", name, ticket)
        there = [it for it in self._places.values() if it.stage is not Stage.OUT]
        if self._fits([*there, place]):
            place.stage = Stage.LOADING
            return Move("load", name)
        staying = [it for it in there if it.stage is not Stage.LEAVING]
        if self._fits([*staying, place]):
            return None  # there will be room
        victim = min(
            (one for one, it in self._places.items() if it.is_idle),
            key=lambda one: self._places[one].used,
            default=None,
        )
        if victim is None:
            return None
        self._places[victim].stage = Stage.LEAVING
        return Move("unload", victim)

    def _fits(self, places: Iterable[_Place]) -> bool:
        sizes = [place.size for place in places]
        has_place = self._max_models is None or len(sizes) <= self._max_models
        return has_place and (self._max_bytes is None or sum(sizes) <= self._max_bytes)
