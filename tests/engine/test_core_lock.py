"""Tests that engines on the same cores take turns, also if one of them is killed."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from headrace_common.plan import Elsewhere
from headrace_common.system.core_lock import CoreLock, open_core_lock

HOLDER = """
import sys, time
from headrace_common.system.core_lock import CoreLock
core_lock = CoreLock((int(sys.argv[1]), int(sys.argv[2])), 1)
with core_lock.held():
    print("mine", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def fds() -> Iterator[tuple[int, int]]:
    made = open_core_lock()
    yield made
    for fd in made:
        os.close(fd)


def test_steps_of_two_engines_never_overlap(fds: tuple[int, int]) -> None:
    taken: list[int] = []
    at_work: list[int] = []
    waits = [threading.Event(), threading.Event()]

    def run(number: int) -> None:
        core_lock = CoreLock(fds, number)
        waits[number].set()
        waits[1 - number].wait(60)
        for _ in range(50):
            with core_lock.held():
                at_work.append(number)
                assert at_work == [number]
                taken.append(number)
                at_work.pop()

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == [0] * 50 + [1] * 50


def test_the_lock_of_a_killed_process_is_released(fds: tuple[int, int]) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"mine\n"
    core_lock = CoreLock(fds, 0)
    has_turn = threading.Event()

    def take() -> None:
        with core_lock.held():
            has_turn.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    assert not has_turn.wait(0.2)
    holder.kill()
    holder.wait(60)
    assert has_turn.wait(60)
    waiting.join(60)
    holder.stdout.close()


def test_each_engine_sees_what_the_others_need(fds: tuple[int, int]) -> None:
    one, two, three = (CoreLock(fds, number) for number in range(3))
    assert one.others() == Elsewhere()
    two.note(0.03, True, True)
    three.note(0.02, False, True)
    assert one.others() == Elsewhere(0.03, True, 2)
    assert two.others() == Elsewhere(0.0, False, 1)
    two.note(0.03, False, False)
    assert one.others() == Elsewhere(0.0, False, 1)


def test_a_lock_is_shared_only_once_another_engine_exists(fds: tuple[int, int]) -> None:
    first = CoreLock(fds, 0)
    assert not first.is_shared
    second = CoreLock(fds, 1)
    assert first.is_shared and second.is_shared
