"""The note that an engine leaves behind."""

import os
import signal

from headrace.core.ids import SequenceId
from headrace.engine.note import StepNote

IDS = (SequenceId(3), SequenceId(2**40))


def test_who_reads_the_note_sees_the_step_at_work() -> None:
    writer = StepNote()
    reader = StepNote(os.dup(writer.fd))
    assert reader.read() == () and reader.running_s() == 0
    writer.write(IDS)
    assert reader.read() == IDS and reader.running_s() >= 0
    writer.clear()
    assert reader.read() == () and reader.running_s() == 0


def test_the_note_outlives_a_writer_that_is_killed_in_mid_step() -> None:
    note = StepNote()
    pid = os.fork()
    if pid == 0:
        note.write(IDS)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert note.read() == IDS
