"""The record of its step that an engine leaves behind."""

import math
import os
import signal
import time

import pytest

from headrace_common.ids import SequenceId
from headrace_common.system.step_record import StepRecord

IDS = (SequenceId(3), SequenceId(2**40))


def test_who_reads_the_record_sees_the_step_at_work() -> None:
    writer = StepRecord()
    reader = StepRecord(os.dup(writer.fd))
    assert reader.read() == ()
    writer.write(IDS, 0.5)
    assert reader.read() == IDS
    writer.clear()
    assert reader.read() == ()
    writer.wait()
    assert reader.read() == () and not reader.is_overdue(math.inf, -math.inf)


def test_the_record_outlives_a_writer_that_is_killed_in_mid_step() -> None:
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
def test_a_step_hangs_at_ten_times_its_prediction(predicted_s: float, limit_s: float) -> None:
    record = StepRecord()
    record.write(IDS, predicted_s)
    now = time.monotonic()
    assert not record.is_overdue(now + min(limit_s, 1e9) - 1, -math.inf)
    assert record.is_overdue(now + limit_s + 1, -math.inf) == (limit_s < math.inf)


def test_an_engine_hangs_if_it_neither_starts_a_step_nor_waits_for_two_minutes() -> None:
    record = StepRecord()
    record.write(IDS, math.inf)
    record.clear()
    now = time.monotonic()
    assert not record.is_overdue(now + 119, -math.inf)
    assert record.is_overdue(now + 121, -math.inf)
    record.wait()
    assert not record.is_overdue(now + 121, -math.inf)


def test_the_time_in_which_all_were_stopped_is_not_a_step_s() -> None:
    record = StepRecord()
    record.write(IDS, 0.1)
    woken_at = time.monotonic() + 600
    assert not record.is_overdue(woken_at + 119, woken_at)
    assert record.is_overdue(woken_at + 121, woken_at)
