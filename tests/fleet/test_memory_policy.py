"""Tests the rules for loading and unloading models, with random histories.

`HEADRACE_SCHEDULES=10000` runs that many histories (`make test-models`).
"""

import itertools
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.fleet.memory_policy import MemoryPolicy, Move, Stage

SIZES = {"a": 3, "b": 4, "c": 5, "d": 20}
MAX_MODELS, MAX_BYTES = 2, 9
NAMES = st.sampled_from(sorted(SIZES))


class Histories(RuleBasedStateMachine):
    """A state machine of requests, loads and unloads that carries out the policy's moves."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = MemoryPolicy[int](MAX_MODELS, MAX_BYTES)
        self.tickets = itertools.count()
        for name, size in SIZES.items():
            self.policy.add(name, size)
        self.waiting: dict[int, str] = {}
        self.held: list[str] = []
        self.loading: list[str] = []
        self.leaving: list[str] = []
        self.there: set[str] = set()

    def act(self) -> None:
        for _ in range(100):
            if (move := self.policy.next_move()) is None:
                return
            self.carry_out(move)
        raise AssertionError("there is always another move")

    def carry_out(self, move: Move[int]) -> None:
        match move.kind:
            case "load":
                assert move.model not in self.there | {*self.loading, *self.leaving}
                self.loading.append(move.model)
            case "unload":
                assert move.model in self.there and move.model not in self.held
                self.there.remove(move.model)
                self.leaving.append(move.model)
            case "enter":
                assert move.model in self.there
                # No request overtakes one whose model is neither loaded nor loading nor leaving.
                on_its_way = {*self.there, *self.loading, *self.leaving}
                assert move.ticket is not None
                before = [name for t, name in self.waiting.items() if t < move.ticket]
                assert all(name in on_its_way for name in before)
                assert self.waiting.pop(move.ticket) == move.model
                self.held.append(move.model)
            case "refuse":
                assert SIZES[move.model] > MAX_BYTES and move.ticket is not None
                assert self.waiting.pop(move.ticket) == move.model

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        ticket = next(self.tickets)
        self.waiting[ticket] = name
        self.policy.ask(name, ticket)
        self.act()

    @rule(name=NAMES)
    def enter_at_once(self, name: str) -> None:
        if self.policy.enter(name):
            assert name in self.there and not self.waiting
            self.held.append(name)
        self.act()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[ticket]
        self.policy.leave(ticket)
        self.act()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(name)
        self.policy.release(name)
        self.act()

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), fails=st.booleans())
    def end_load(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(name)
        if fails:
            for ticket in self.policy.lost(name):
                assert self.waiting.pop(ticket) == name
            assert name not in self.waiting.values()
        else:
            self.policy.loaded(name)
            self.there.add(name)
        self.act()

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def end_unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        self.leaving.remove(name)
        self.policy.unloaded(name)
        self.act()

    @rule(name=NAMES)
    def unload_when_idle(self, name: str) -> None:
        self.policy.unload_when_idle(name)
        self.act()

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Give up an engine and its streams."""
        name = data.draw(st.sampled_from(sorted(self.there)))
        self.there.remove(name)
        for ticket in self.policy.lost(name):
            assert self.waiting.pop(ticket) == name
        self.act()

    @invariant()
    def the_budget_is_never_exceeded(self) -> None:
        in_memory = [*self.there, *self.loading, *self.leaving]
        assert len(in_memory) <= MAX_MODELS and sum(map(SIZES.__getitem__, in_memory)) <= MAX_BYTES

    @invariant()
    def the_books_are_right(self) -> None:
        for name in SIZES:
            stage = self.policy.stage(name)
            assert (stage is Stage.IN) == (name in self.there)
            assert (stage is Stage.LOADING) == (name in self.loading)

    def teardown(self) -> None:
        """Check that all waiting requests are admitted once loads end and streams finish."""
        for _ in range(1000):
            if not self.waiting:
                return
            for name in list(self.loading):
                self.loading.remove(name)
                self.policy.loaded(name)
                self.there.add(name)
            for name in list(self.leaving):
                self.leaving.remove(name)
                self.policy.unloaded(name)
            self.act()
            if self.held:
                self.policy.release(self.held.pop())
                self.act()
        raise AssertionError(f"somebody waits for ever: {self.waiting}")


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_SCHEDULES", "100")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def moves(policy: MemoryPolicy[int]) -> list[Move[int]]:
    found = []
    while (move := policy.next_move()) is not None:
        found.append(move)
    return found


def test_later_requests_for_a_loaded_model_wait_behind_one_for_another() -> None:
    policy = MemoryPolicy[int](max_models=1)
    policy.add("a", 1)
    policy.add("b", 1)
    first, second, third = range(3)
    policy.ask("a", first)
    assert moves(policy) == [Move("load", "a")]
    policy.loaded("a")
    assert moves(policy) == [Move("enter", "a", first)]
    policy.ask("b", second)
    policy.ask("a", third)
    assert moves(policy) == []
    policy.release("a")
    assert moves(policy) == [Move("unload", "a")]
    policy.unloaded("a")
    assert moves(policy) == [Move("load", "b")]
    policy.loaded("b")
    assert moves(policy) == [Move("enter", "b", second)]
    policy.release("b")
    assert moves(policy) == [Move("unload", "b")]
    policy.unloaded("b")
    policy.leave(third)
    assert moves(policy) == [] and policy.idle() == []


def test_the_least_recently_used_idle_model_makes_room() -> None:
    policy = MemoryPolicy[int](max_models=2)
    for name in "abc":
        policy.add(name, 1)
    for ticket, name in enumerate("abab"):
        policy.ask(name, ticket)
        if moves(policy)[:1] == [Move("load", name)]:
            policy.loaded(name)
            moves(policy)
        policy.release(name)
    policy.hold("a")  # a stream lives
    policy.ask("c", 4)
    assert moves(policy) == [Move("unload", "b")]


def test_a_removed_model_is_gone_once_it_is_unloaded_and_unused() -> None:
    books = MemoryPolicy[str]()
    books.add("a", 1)
    books.ask("a", "early")
    assert books.next_move() == ("load", "a", None)
    books.loaded("a")
    assert books.next_move() == ("enter", "a", "early")
    books.unload_when_idle("a")
    books.ask("a", "late")
    assert books.next_move() is None and not books.is_gone("a")
    assert books.remove_tickets("a") == ["late"]
    books.release("a")
    assert books.next_move() == ("unload", "a", None)
    books.unloaded("a")
    assert books.is_gone("a") and books.next_move() is None
    books.hold("a")  # as by a stream that waits for it
    assert not books.is_gone("a")


def test_a_loaded_model_admits_at_once_unless_unloading_or_others_wait() -> None:
    policy = MemoryPolicy[int](max_models=1)
    policy.add("a", 1)
    policy.add("b", 1)
    policy.ask("a", 0)
    assert not policy.enter("a"), "it is not in memory"
    moves(policy)
    policy.loaded("a")
    assert not policy.enter("a"), "the first request still waits"
    moves(policy)
    assert policy.enter("a")
    policy.unload_when_idle("a")
    assert not policy.enter("a"), "it is to leave"
