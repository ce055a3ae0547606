"""Shows a download on stderr: one line that updates on a terminal, else one per tenth."""

import sys
import time

from headrace_common.loading import download_words


class DownloadLine:
    """Called with the bytes so far and the bytes in all."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._began = time.monotonic()
        self._told_tenth = -1
        self._moves = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total
        if not self._moves and tenth == self._told_tenth:
            return
        self._told_tenth = tenth
        start, end = ("\r", "\x1b[K") if self._moves else ("", "\n")
        if self._moves and done == total:
            end += "\n"
        print(f"{start}{self._line(done, total)}", end=end, file=sys.stderr, flush=True)

    def _line(self, done: int, total: int) -> str:
        words = download_words(done, total, time.monotonic() - self._began)
        return f"Downloading {self._model}: {100 * done // total} % {words}"
