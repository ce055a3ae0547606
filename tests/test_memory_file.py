"""Tests the files behind shared memory, also on systems without memfd_create and /proc."""

import os
from pathlib import Path

import pytest

from headrace.workers import image_file
from headrace.workers.image_file import PixelFile
from headrace_common.ids import SequenceId
from headrace_common.system import memory_file
from headrace_common.system.core_lock import open_core_lock
from headrace_common.system.memory_file import open_memory_file
from headrace_common.system.step_record import StepRecord


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a system with neither memfd_create nor /proc."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(image_file, "can_open_anew", lambda: False)
    monkeypatch.setattr("headrace_common.system.core_lock.can_open_anew", lambda: False)


def test_an_unnamed_memory_file_keeps_written_data(elsewhere: None) -> None:
    fd = open_memory_file("test")
    os.write(fd, b"kept")
    assert os.pread(fd, 10, 0) == b"kept"
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_a_step_record_can_be_read_through_a_duplicated_descriptor(elsewhere: None) -> None:
    written = StepRecord()
    read = StepRecord(os.dup(written.fd))
    written.write([SequenceId(5)], 1.0)
    assert read.read() == (5,)
    written.close()
    read.close()


def test_engines_without_a_core_lock_log_that_they_cannot_take_turns(
    elsewhere: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_core_lock() == ()
    assert "cannot take turns" in caplog.text


@pytest.mark.usefixtures("elsewhere")
def test_images_lie_in_a_temporary_file_that_goes_with_its_owner() -> None:
    pixels = PixelFile()
    path = Path(pixels.path)
    path.write_bytes(b"pixels")
    pixels.close()
    assert not path.exists()


def test_images_on_linux_have_no_file_that_another_program_could_list() -> None:
    if not memory_file.can_open_anew():
        pytest.skip("not Linux")
    pixels = PixelFile()
    Path(pixels.path).write_bytes(b"pixels")
    assert Path(pixels.path).read_bytes() == b"pixels"
    pixels.close()
