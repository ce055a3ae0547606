"""The note that an engine leaves behind."""

import math
import os
import signal
import time

import pytest

from headrace.core.ids import SequenceId
from headrace.engine.note import StepNote

IDS = (SequenceId(3), SequenceId(2**40))


def test_who_reads_the_note_sees_the_step_at_work() -> None:
    writer = StepNote()
    reader = StepNote(os.dup(writer.fd))
    assert reader.read() == ()
    writer.write(IDS, 0.5)
    assert reader.read() == IDS
    writer.clear()
    assert reader.read() == () and not reader.is_overdue(math.inf, -math.inf)


def test_the_note_outlives_a_writer_that_is_killed_in_mid_step() -> None:
    note = StepNote()
    pid = os.fork()
    if pid == 0:
        note.write(IDS, 0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert note.read() == IDS


@pytest.mark.parametrize(
    ("predicted_s", "limit_s"), [(0.1, 120), (12, 120), (50, 500), (0, 600), (math.inf, math.inf)]
)
def test_a_step_hangs_at_ten_times_its_prediction(predicted_s: float, limit_s: float) -> None:
    note = StepNote()
    note.write(IDS, predicted_s)
    now = time.monotonic()
    assert not note.is_overdue(now + min(limit_s, 1e9) - 1, -math.inf)
    assert note.is_overdue(now + limit_s + 1, -math.inf) == (limit_s < math.inf)


def test_the_time_in_which_all_were_stopped_is_not_a_step_s() -> None:
    note = StepNote()
    note.write(IDS, 0.1)
    woken_at = time.monotonic() + 600
    assert not note.is_overdue(woken_at + 119, woken_at)
    assert note.is_overdue(woken_at + 121, woken_at)
