import queue
import time

from headrace_common import wire
from headrace_common.ids import SequenceId
from headrace_common.messages import NUM_TRACED_STEPS, Shutdown, Status, StepTrace
from headrace_engine.engine import Engine, Inbox
from headrace_engine.scheduler.scheduler import Scheduler
from tests.engine.fakes import Runner, Sent
from tests.scheduler.builders import make_scheduler, make_submit


def run(scheduler: Scheduler, *numbers: int, num_prompt: int = 100, max_tokens: int = 4) -> Sent:
    inbox: Inbox = queue.SimpleQueue()
    for number in numbers:
        inbox.put(make_submit(number, num_prompt, max_tokens=max_tokens, arrival=time.monotonic()))
    sent = Sent()
    engine = Engine(scheduler, Runner(), sent)
    while engine._receive(inbox) and engine.step():
        if scheduler.is_idle:
            inbox.put(Shutdown())
    return sent


def test_every_step_is_reported_once() -> None:
    sent = run(make_scheduler(), 1, 2)
    steps = [step for status in sent.statuses for step in status.steps]
    assert len(steps) == sent.statuses[-1].num_steps
    assert sum(step.num_prompt_tokens for step in steps) == 200
    assert {step.actual for step in steps} == {0.01}


def test_a_status_has_a_limited_number_of_steps() -> None:
    sent = run(make_scheduler(), 1, max_tokens=3 * NUM_TRACED_STEPS)
    assert max(len(status.steps) for status in sent.statuses) <= NUM_TRACED_STEPS


def test_a_status_is_decoded_with_its_steps() -> None:
    step = StepTrace(4, 35, 0.1, 0.11, 0.12, 0.07, "decode")
    status = Status(1, 0, 0, 5, 0, 7, (SequenceId(3),), missed={"model": 2}, steps=(step,))
    assert wire._DECODER.decode(wire.encode(status)[4:]) == status
