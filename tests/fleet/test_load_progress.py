"""Tests the progress of a load and when it is reported."""

import pytest

from headrace.fleet import load_progress
from headrace.fleet.load_progress import LoadProgressWatch, LoadReporter
from headrace_common.loading import COMPILING, READING, LoadProgress, duration, time_left
from headrace_common.messages import Loading
from tools.harness.eventually import eventually


class ManualClock:
    """A manual clock for the stages of a load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(load_progress.time, "monotonic", lambda: self.now)


def test_the_seconds_of_a_stage_count_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    watch = LoadProgressWatch()
    assert watch.progress is None
    watch.begin(COMPILING)
    clock.now += 5
    watch.tell(Loading(0.5, COMPILING, "attend"))
    assert watch.progress == LoadProgress(COMPILING, 0.5, "attend", 5.0)
    watch.begin(READING)
    assert watch.progress == LoadProgress(READING)
    watch.end()
    assert watch.progress is None


def test_load_progress_is_printed_with_stage_share_and_seconds() -> None:
    assert str(LoadProgress("loading weights", 0.4, "", 3.2)) == "loading weights, 40 % (3 s)"
    told = LoadProgress("compiling kernels", None, "attend", 41.0, "small")
    assert str(told) == "small: compiling kernels, attend (41 s)"


def test_a_download_reports_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    watch = LoadProgressWatch()
    watch.download(0, 4 << 20)
    clock.now += 2
    watch.download(1 << 20, 4 << 20)
    now = watch.progress
    assert now is not None and now.share == 0.25
    assert now.words == "downloading the model, 25 % of 4 MiB"
    clock.now += 2
    watch.download(1 << 20, 4 << 20)
    now = watch.progress
    expected = "downloading the model, 25 % of 4 MiB, 0.2 MiB/s, 12 s left (4 s)"
    assert now is not None and str(now) == expected


def test_a_continued_download_counts_only_new_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    watch = LoadProgressWatch()
    watch.download(900 << 20, 1000 << 20)
    clock.now += 10
    watch.download(950 << 20, 1000 << 20)
    now = watch.progress
    assert now is not None and now.detail == "of 1000 MiB, 5.0 MiB/s, 10 s left"


def test_an_estimate_needs_three_seconds_and_two_percent() -> None:
    assert time_left(50, 100, 2.9) == ""
    assert time_left(1.9, 100, 3.0) == ""
    assert time_left(100, 100, 9.0) == ""
    assert time_left(2, 100, 4.0) == ", 3 min 16 s left"


def test_durations_are_printed_in_seconds_minutes_and_hours() -> None:
    said = [duration(seconds) for seconds in (0.2, 59.4, 59.6, 200, 3599.7, 298_933)]
    assert said == ["0 s", "59 s", "1 min 0 s", "3 min 20 s", "1 h 0 min", "83 h 2 min"]


def test_a_stage_is_reported_at_once_and_then_repeatedly() -> None:
    watch, told = LoadProgressWatch(), list[LoadProgress]()
    watch.begin(READING)
    with LoadReporter(lambda: (watch.progress,), told.append, every_s=0.2):
        assert [one.stage for one in told] == [READING]
        watch.begin(COMPILING)
        eventually(lambda: [one.stage for one in told].count(COMPILING) >= 3)
        watch.end()
    seconds = [one.seconds for one in told if one.stage == COMPILING]
    assert seconds == sorted(seconds) and seconds[-1] >= 0.2
