"""A program on a terminal of its own, as a person would use it."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_PATIENCE_S = 120


class Terminal:
    """`text` is all that was shown so far, without control sequences; `raw` has them."""

    def __init__(self, *words: str, **variables: str) -> None:
        self.text = self.raw = ""
        self._seen = 0
        ours, theirs = pty.openpty()
        self._fd = ours
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
            | variables,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)

    def type(self, line: str) -> None:
        self.type_on(f"{line}\n")

    def type_on(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def press_ctrl_c(self) -> None:
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """A moment after what was waited for: CPython loses one between a prompt and its wait."""
        time.sleep(0.3)
        self.process.send_signal(number)

    def press_ctrl_d(self) -> None:
        os.write(self._fd, b"\x04")

    def wait_for(self, pattern: str) -> str:
        """What was shown up to the pattern and with it, from the last call on."""
        begun = self._seen
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := re.search(pattern, self.text[begun:])):
            assert time.monotonic() < deadline and self.read(), self.text
        self._seen = begun + found.end()
        return self.text[begun : self._seen]

    def wait_until_ended(self) -> int:
        """The exit code."""
        while self.read():
            pass
        return self.process.wait(timeout=_PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)

    def read(self) -> bool:
        """Takes what is shown within a second; False once the program has ended."""
        if not select.select([self._fd], [], [], 1.0)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the last one at the other end has gone
            return False
        shown = data.decode("utf-8", "replace")
        self.raw += shown
        self.text += _CONTROLS.sub("", shown)
        return bool(data)


@contextlib.contextmanager
def terminal(*words: str, **variables: str) -> Iterator[Terminal]:
    shown = Terminal(*words, **variables)
    try:
        yield shown
    finally:
        shown.close()
