"""Reports the progress of loads from a thread of the gateway.

The thread is separate, so that the thread which loads a model cannot delay the reports.
"""

import threading
import time
from collections.abc import Callable, Iterable

from headrace_common.loading import DOWNLOADING, LoadProgress, download_words
from headrace_common.messages import WEIGHTS, Loading

EVERY_S = 1.5
"""Seconds between two reports of a load.

The documentation promises 2 s; the smaller value leaves a margin.
"""

_CHECK_INTERVAL_S = 0.1

OnLoading = Callable[[LoadProgress], None]
ReadProgress = Callable[[], Iterable[LoadProgress | None]]


class LoadProgressWatch:
    """The progress of one load.

    One thread at a time writes the progress; any thread may read it.
    """

    def __init__(self, model: str = "") -> None:
        # The loaded share of the weights, from 0 to 1; None in all other stages.
        self.share: float | None = None
        # Downloaded and total bytes; None if nothing is being downloaded.
        self.downloaded: tuple[int, int] | None = None
        # The bytes that an earlier, interrupted download had already stored.
        self._kept = 0
        self._model = model
        self._now: tuple[Loading, float] | None = None

    def tell(self, loading: Loading) -> None:
        """Set the current stage and its progress."""
        began = time.monotonic()
        if self._now is not None and self._now[0].stage == loading.stage:
            began = self._now[1]
        self._now = loading, began
        if loading.stage == WEIGHTS:
            self.share = loading.share

    def begin(self, stage: str) -> None:
        self.share = None
        self.tell(Loading(0.0, stage))

    def download(self, done: int, total: int) -> None:
        """Set the number of downloaded and total bytes."""
        if self.downloaded is None:
            self._kept = done
        self.downloaded = done, total
        self.begin(DOWNLOADING)
        assert self._now is not None
        words = download_words(done, total, time.monotonic() - self._now[1], self._kept)
        self.tell(Loading(done / total, DOWNLOADING, words))

    def end(self) -> None:
        """Report that the load has ended."""
        self._now = self.share = self.downloaded = None

    @property
    def stage(self) -> str:
        """Return the stage and its details as text; "" if nothing is loading."""
        if (now := self._now) is None:
            return ""
        return " ".join(filter(None, (now[0].stage, now[0].detail)))

    @property
    def progress(self) -> LoadProgress | None:
        """Return the progress of the load; None if nothing is loading."""
        if (now := self._now) is None:
            return None
        loading, began = now
        seconds = time.monotonic() - began
        share = loading.share if loading.share or loading.detail else None
        return LoadProgress(loading.stage, share, loading.detail, seconds, self._model)


class LoadReporter:
    """Calls `on_progress` in a thread when a stage begins, and at least every `every_s` seconds.

    Calls `on_end` when no load is in progress any more. Used as a context manager. The first report
    is made before the body of the `with` statement runs. A stage that begins and ends between two
    checks is not reported.
    """

    def __init__(
        self,
        read_progress: ReadProgress,
        on_progress: OnLoading,
        on_end: Callable[[], None] = lambda: None,
        every_s: float = EVERY_S,
    ) -> None:
        self._read_progress = read_progress
        self._on_progress = on_progress
        self._on_end = on_end
        self._every_s = every_s
        # The last reported stage and the time of this report. The keys are model names.
        self._reported: dict[str, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)

    def __enter__(self) -> "LoadReporter":
        self._report_changes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def follow(self, read_progress: ReadProgress) -> None:
        """Switch to another function that reads the progress."""
        self._read_progress = read_progress

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_INTERVAL_S):
            self._report_changes()

    def _report_changes(self) -> None:
        now, reported = time.monotonic(), self._reported
        self._reported = {}
        for one in filter(None, self._read_progress()):
            stage, at = reported.get(one.model, ("", 0.0))
            if one.stage != stage or now >= at + self._every_s:
                self._on_progress(one)
                at = now
            self._reported[one.model] = one.stage, at
        if reported and not self._reported:
            self._on_end()
