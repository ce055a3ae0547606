"""Says what loads are doing: by a clock of its own, however busy whoever loads may be."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from headrace_common.loading import DOWNLOADING, LoadProgress, download_words
from headrace_common.messages import WEIGHTS, Loading

EVERY_S = 1.5
"""A little less than the 2 s that are promised."""

_CHECK_INTERVAL_S = 0.1

OnLoading = Callable[[LoadProgress], None]
ReadProgress = Callable[[], Iterable[LoadProgress | None]]


class LoadWatch:
    """The progress of one load. One thread at a time reports to it, and any may read it."""

    def __init__(self, model: str = "") -> None:
        self.share: float | None = None  # of the weights, while they are loaded
        self.downloaded: tuple[int, int] | None = None  # bytes of a download, done and in all
        self._model = model
        self._now: tuple[Loading, float] | None = None

    def tell(self, loading: Loading) -> None:
        """Reports what the load does now."""
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
        """The bytes that have come, and how many there will be."""
        self.downloaded = done, total
        self.begin(DOWNLOADING)
        assert self._now is not None
        words = download_words(done, total, time.monotonic() - self._now[1])
        self.tell(Loading(done / total, DOWNLOADING, words))

    @contextlib.contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Reports a stage that lasts as long as the context."""
        self.begin(stage)
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Reports that the load has ended."""
        self._now = self.share = self.downloaded = None

    @property
    def stage(self) -> str:
        """The stage with its details, in words; "" if nothing is loaded."""
        if (now := self._now) is None:
            return ""
        return " ".join(filter(None, (now[0].stage, now[0].detail)))

    @property
    def progress(self) -> LoadProgress | None:
        """The progress of the load; None if nothing is loaded."""
        if (now := self._now) is None:
            return None
        loading, began = now
        seconds = time.monotonic() - began
        share = loading.share if loading.share or loading.detail else None
        return LoadProgress(loading.stage, share, loading.detail, seconds, self._model)


class LoadTeller:
    """A thread that tells soon when a stage begins, and at least every `EVERY_S` what goes on.

    A context. What is told at first is told before it is entered. A stage that is over before the
    next look is never told.
    """

    def __init__(self, read_progress: ReadProgress, tell: OnLoading) -> None:
        self.read_progress = read_progress
        self._tell = tell
        self._told: dict[str, tuple[str, float]] = {}  # stage and time, by model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)

    def __enter__(self) -> "LoadTeller":
        self._tell_once()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_INTERVAL_S):
            self._tell_once()

    def _tell_once(self) -> None:
        now, told = time.monotonic(), self._told
        self._told = {}
        for one in filter(None, self.read_progress()):
            stage, at = told.get(one.model, ("", 0.0))
            if one.stage != stage or now >= at + EVERY_S:
                self._tell(one)
                at = now
            self._told[one.model] = one.stage, at
