"""News of a load, and when it is told."""

import pytest

from headrace.fleet import load_watch
from headrace.fleet.load_watch import LoadTeller, LoadWatch
from headrace_common.loading import COMPILING, READING, LoadProgress
from headrace_common.messages import Loading
from tools.harness.eventually import eventually


class ManualClock:
    """The clock by which stages are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(load_watch.time, "monotonic", lambda: self.now)


def test_a_stage_counts_its_seconds_from_its_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    watch = LoadWatch()
    assert watch.progress is None
    watch.begin(COMPILING)
    clock.now += 5
    watch.tell(Loading(0.5, COMPILING, "attend"))
    assert watch.progress == LoadProgress(COMPILING, 0.5, "attend", 5.0)
    watch.begin(READING)
    assert watch.progress == LoadProgress(READING)
    watch.end()
    assert watch.progress is None


def test_a_line_has_the_stage_the_share_and_the_seconds() -> None:
    assert str(LoadProgress("loading weights", 0.4, "", 3.2)) == "loading weights, 40 % (3 s)"
    told = LoadProgress("compiling kernels", None, "attend", 41.0, "small")
    assert str(told) == "small: compiling kernels, attend (41 s)"


def test_a_download_tells_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    watch = LoadWatch()
    watch.download(0, 4 << 20)
    clock.now += 2
    watch.download(1 << 20, 4 << 20)
    now = watch.progress
    expected = "downloading the model, 25 % of 4 MiB, 0.5 MiB/s, 6 s left (2 s)"
    assert now is not None and now.share == 0.25 and str(now) == expected


def test_a_stage_is_told_at_once_and_again_while_nothing_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_watch, "EVERY_S", 0.2)
    watch, told = LoadWatch(), list[LoadProgress]()
    watch.begin(READING)
    with LoadTeller(lambda: (watch.progress,), told.append):
        assert [one.stage for one in told] == [READING]
        watch.begin(COMPILING)
        eventually(lambda: [one.stage for one in told].count(COMPILING) >= 3)
        watch.end()
    seconds = [one.seconds for one in told if one.stage == COMPILING]
    assert seconds == sorted(seconds) and seconds[-1] >= 0.2
