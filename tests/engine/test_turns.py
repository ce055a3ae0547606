"""Engines on the same cores: one step at a time, in turns, whoever dies."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from headrace.engine.turns import CoreTurns, Needs, SharedTurns

HOLDER = """
import sys, time
from headrace.engine.turns import CoreTurns
turns = CoreTurns((int(sys.argv[1]), int(sys.argv[2])), 1)
with turns.mine():
    print("mine", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def shared() -> Iterator[SharedTurns]:
    made = SharedTurns()
    yield made
    made.close()


def test_steps_of_two_engines_never_overlap(shared: SharedTurns) -> None:
    taken: list[int] = []
    at_work: list[int] = []
    waits = [threading.Event(), threading.Event()]

    def run(number: int) -> None:
        turns = CoreTurns(shared.fds, number)
        waits[number].set()
        waits[1 - number].wait(60)
        for _ in range(50):
            with turns.mine():
                at_work.append(number)
                assert at_work == [number]
                taken.append(number)
                at_work.pop()
        turns.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == [0] * 50 + [1] * 50


def test_the_turn_of_a_process_that_was_killed_is_free(shared: SharedTurns) -> None:
    fds = [str(fd) for fd in shared.fds]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *fds], pass_fds=shared.fds, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"mine\n"
    turns = CoreTurns(shared.fds, 0)
    has_turn = threading.Event()

    def take() -> None:
        with turns.mine():
            has_turn.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    assert not has_turn.wait(0.2)
    holder.kill()
    holder.wait(60)
    assert has_turn.wait(60)
    waiting.join(60)
    holder.stdout.close()
    turns.close()


def test_each_knows_what_the_others_need_and_not_its_own(shared: SharedTurns) -> None:
    one, two, three = (CoreTurns(shared.fds, number) for number in range(3))
    assert one.others() == Needs()
    two.note(0.03, True, True)
    three.note(0.02, False, True)
    assert one.others() == Needs(0.03, 1, 2)
    assert two.others() == Needs(0.0, 0, 1)
    two.note(0.03, False, False)
    assert one.others() == Needs(0.0, 0, 1)
    for turns in (one, two, three):
        turns.close()
