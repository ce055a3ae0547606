"""Shows a download on stderr: one line that updates on a terminal, else one per tenth."""

import sys
import time

_MIB = 1 << 20


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
        seconds = max(1e-3, time.monotonic() - self._began)
        rate = done / seconds
        left = f", {(total - done) / rate:.0f} s left" if 0 < done < total else ""
        share = f"{100 * done // total} % of {total / _MIB:.0f} MiB"
        return f"Downloading {self._model}: {share}, {rate / _MIB:.1f} MiB/s{left}"
