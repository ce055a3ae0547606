"""Tests the record that an engine writes about its current step."""

import math
import os
import signal
import time

import pytest

from headrace_common.ids import SequenceId
from headrace_common.system.step_record import StepRecord

IDS = (SequenceId(3), SequenceId(2**40))


def test_the_record_shows_the_current_step() -> None:
    writer = StepRecord()
    reader = StepRecord(os.dup(writer.fd))
    assert reader.read() == ()
    writer.write(IDS, 0.5)
    assert reader.read() == IDS
    writer.clear()
    assert reader.read() == ()
    writer.wait()
    assert reader.read() == () and not reader.is_overdue(math.inf, -math.inf)


def test_the_record_survives_a_writer_that_is_killed_during_a_step() -> None:
    record = StepRecord()
    pid = os.fork()
    if pid == 0:
        record.write(IDS, 0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert record.read() == IDS


@pytest.mark.parametrize(
    ("predicted_s", "limit_s"), [(0.1, 120), (12, 120), (50, 500), (0, 600), (math.inf, math.inf)]
)
def test_a_step_counts_as_hung_after_ten_times_its_predicted_time(
    predicted_s: float, limit_s: float
) -> None:
    record = StepRecord()
    record.write(IDS, predicted_s)
    now = time.monotonic()
    assert not record.is_overdue(now + min(limit_s, 1e9) - 1, -math.inf)
    assert record.is_overdue(now + limit_s + 1, -math.inf) == (limit_s < math.inf)


def test_an_engine_counts_as_hung_if_it_neither_steps_nor_waits_for_two_minutes() -> None:
    record = StepRecord()
    record.write(IDS, math.inf)
    record.clear()
    now = time.monotonic()
    assert not record.is_overdue(now + 119, -math.inf)
    assert record.is_overdue(now + 121, -math.inf)
    record.wait()
    assert not record.is_overdue(now + 121, -math.inf)


def test_time_while_everything_was_suspended_does_not_count() -> None:
    record = StepRecord()
    record.write(IDS, 0.1)
    woken_at = time.monotonic() + 600
    assert not record.is_overdue(woken_at + 119, woken_at)
    assert record.is_overdue(woken_at + 121, woken_at)
