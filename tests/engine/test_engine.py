"""Tests the engine's loop if steps fail or the gateway is slow."""

import math
import queue
import time

import pytest

from headrace_common.messages import FinishReason, Shutdown
from headrace_common.system.step_record import StepRecord
from headrace_engine.engine import MAX_UNSENT, Engine, Inbox
from tests.engine.fakes import Runner, Sent
from tests.scheduler.builders import make_scheduler, make_submit


def play(runner: Runner, sent: Sent, num_prompt: int = 100) -> None:
    """Run one request from its submission to its end."""
    inbox: Inbox = queue.SimpleQueue()
    inbox.put(make_submit(1, num_prompt, max_tokens=2))
    sent.when_done = lambda: inbox.put(Shutdown())
    Engine(make_scheduler(max_step_tokens=64), runner, sent).run(inbox)


@pytest.mark.parametrize(("num_times", "then"), [(1, [32, 32, 32, 4, 1]), (2, [16] * 6 + [4, 1])])
def test_a_step_that_runs_out_of_memory_is_retried_with_half_the_tokens(
    num_times: int, then: list[int]
) -> None:
    runner, sent = Runner(*[MemoryError()] * num_times), Sent()
    play(runner, sent)
    assert runner.lengths == [64, 32][:num_times] + then
    assert sent.finishes == [FinishReason.LENGTH]


def test_only_a_request_that_runs_out_of_memory_in_the_smallest_step_ends() -> None:
    runner, sent = Runner(*[MemoryError()] * 3), Sent()
    play(runner, sent)
    assert runner.lengths == [64, 32, 16] and sent.finishes == [FinishReason.ERROR]


def test_a_step_during_which_the_engine_was_suspended_is_not_learned() -> None:
    scheduler, sent = make_scheduler(max_step_tokens=64), Sent()
    engine = Engine(scheduler, Runner(), sent)
    scheduler.add(make_submit(1, 100, max_tokens=2), 0.0)
    engine.step()
    engine._stops._ticked_at -= 600
    engine._ended_at -= 600
    engine.step()
    engine.step()
    assert scheduler.is_idle and scheduler.status().num_steps == 3
    traced = [step.num_prompt_tokens for status in sent.statuses for step in status.steps]
    assert traced == [64, 0], "the step of 36 tokens was not timed"


def test_steps_held_back_by_a_slow_gateway_are_counted_once() -> None:
    sent = Sent(0, *[MAX_UNSENT + 1] * 3)
    play(Runner(), sent, num_prompt=4)
    assert sent.statuses[-1].missed == {"gateway": 1}


def test_only_an_engine_that_waits_for_messages_may_take_minutes() -> None:
    record, sent = StepRecord(), Sent()
    overdue: list[bool] = []

    def look() -> None:
        overdue.append(record.is_overdue(time.monotonic() + 121, -math.inf))

    class Messages(queue.SimpleQueue):  # type: ignore[type-arg]
        """A queue that is empty at first, so the engine waits for each message."""

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            if block:
                look()
            return super().get(block, timeout)

    inbox: Inbox = Messages()
    inbox.put(make_submit(1, 4, max_tokens=2))

    def done() -> None:
        look()
        inbox.put(Shutdown())

    sent.when_done = done
    Engine(make_scheduler(), Runner(), sent, record).run(inbox)
    look()
    assert overdue == [False, True, False, False]
