"""Shows on stderr how far models are loaded, even before the heavy modules are imported."""

import time

import msgspec

from headrace.cli.logs import can_show_bar, say
from headrace.fleet.load_progress import LoadProgressWatch, LoadReporter
from headrace_common.load_bar import LoadBar
from headrace_common.loading import ON_LOADING, LoadProgress

_EVERY_S = 0.25
# If stderr is not a terminal, a running stage is shown again after this many seconds.
_AGAIN_S = 30.0


class LoadView:
    """Shows one bar that disappears at the end on a terminal, otherwise a few lines per stage.

    The bar is one line high, so that a line of the log can replace it until its next redraw.
    """

    _is_for_program = False

    @classmethod
    def write_for_program(cls) -> None:
        """Make all later reports lines of JSON, because a program reads stderr."""
        cls._is_for_program = True

    def __init__(self) -> None:
        # When each stage of a model was last shown.
        self._shown: dict[tuple[str, str], float] = {}
        self._bar = LoadBar()

    def __call__(self, now: LoadProgress) -> None:
        if self._is_for_program:
            say(msgspec.json.encode(now).decode())
        elif can_show_bar():
            self._bar.draw(now)
        else:
            self._show_line(now)

    def __enter__(self) -> "LoadView":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Remove the bar. A later load begins another bar."""
        self._shown.clear()
        self._bar.end()

    def _show_line(self, now: LoadProgress) -> None:
        last = self._shown.get((now.model, now.stage))
        if last is not None and time.monotonic() < last + _AGAIN_S:
            return
        self._shown[now.model, now.stage] = time.monotonic()
        say(f"headrace: {now.words if last is None else now}...")


class LoadLines(LoadReporter):
    """Shows the progress of a load in a `with` block. `follow` switches to other loads."""

    def __init__(self, stage: str, model: str = "") -> None:
        self.watch = LoadProgressWatch(model)
        self.watch.begin(stage)
        self._view = LoadView()
        super().__init__(lambda: (self.watch.progress,), self._view, self._view.end, _EVERY_S)

    def __enter__(self) -> "LoadLines":
        self._before = ON_LOADING.set(self.watch.tell)
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        ON_LOADING.reset(self._before)
        self._view.end()
