"""Shows the progress of a call with many inputs, on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _ignore() -> None:
    pass


@contextmanager
def progress_bar(num_inputs: int, words: str, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that counts one finished input.

    A terminal and a notebook show a bar. Elsewhere, one line is printed at the end.
    """
    if not is_shown:
        yield _ignore
        return
    # Only callers that ask for a bar wait for this import.
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal or console.is_jupyter:
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(words, total=num_inputs)
            yield lambda: bar.advance(task)
        return
    began, num_done = time.monotonic(), 0

    def count() -> None:
        nonlocal num_done
        num_done += 1

    try:
        yield count
    finally:
        seconds = time.monotonic() - began
        print(f"{words}: {num_done} of {num_inputs} in {seconds:.1f} s", file=sys.stderr)
