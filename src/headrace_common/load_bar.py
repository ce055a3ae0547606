"""Shows the progress of a load on a terminal."""

import os
import sys
from typing import TYPE_CHECKING

from headrace_common.loading import LoadProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_WIDTH = 16


def can_redraw() -> bool:
    """Return whether stderr is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class LoadBar:
    """Draws the progress of a load as one line of a terminal. The line disappears at the end."""

    def __init__(self) -> None:
        self._bar: tuple[Progress, TaskID] | None = None

    def draw(self, now: LoadProgress) -> None:
        text = str(now) if now.share is None else now.words
        if self._bar is None:
            self._bar = _new_bar(text)
        bar, number = self._bar
        task = bar.tasks[0]
        # `Progress.update` cannot set a total back to None.
        task.total = None if now.share is None else 1.0
        bar.update(number, description=text, completed=now.share or 0.0)

    def end(self) -> None:
        """Remove the bar. A later call of `draw` begins another bar."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _new_bar(description: str) -> "tuple[Progress, TaskID]":
    # These imports take longer than all others together, and only some commands draw a bar.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    column = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
    bar = Progress(
        BarColumn(_WIDTH), column, console=Console(stderr=True), refresh_per_second=4,
        transient=True, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
    task = bar.add_task(description, total=None)
    bar.start()
    return bar, task
