"""A program on a terminal of its own, as a person would use it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\x08]")
_TO_THE_RIGHT = re.compile(r"\x1b\[\d*C")
_BEGUN = re.compile(r"\x1b(\[[0-9;?]*)?$")  # the rest of a sequence is still to come
_PATIENCE_S = 120


def _take_terminal() -> None:
    """Ctrl-C is a key of the terminal that is the program's own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`text` is all that was shown so far, without control sequences; `raw` has them."""

    def __init__(self, *words: str, **variables: str) -> None:
        self.text = self.raw = self._rest = ""
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
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def type(self, line: str) -> None:
        self.type_on(f"{line}\n")

    def type_on(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def paste(self, text: str) -> None:
        """As a terminal does it: marked, if the program has asked for that."""
        is_marked = self.raw.rfind("\x1b[?2004h") > self.raw.rfind("\x1b[?2004l")
        pasted = text.replace("\n", "\r")
        self.type_on(f"\x1b[200~{pasted}\x1b[201~" if is_marked else pasted)

    def press_ctrl_c(self) -> None:
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """A moment after what was waited for: CPython loses one between a prompt and its wait."""
        time.sleep(0.3)
        self.process.send_signal(number)

    def press_ctrl_d(self) -> None:
        os.write(self._fd, b"\x04")

    def modes(self) -> list[object]:
        """How the terminal treats keys and output."""
        return termios.tcgetattr(self._fd)

    def wait_for(self, pattern: str) -> str:
        """Text shown up to the pattern and with it, from the last call on."""
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
        self._rest += shown
        whole = self._rest[: found.start()] if (found := _BEGUN.search(self._rest)) else self._rest
        self._rest = self._rest[len(whole) :]
        self.text += _CONTROLS.sub("", _TO_THE_RIGHT.sub(" ", whole))
        return bool(data)


@contextlib.contextmanager
def terminal(*words: str, **variables: str) -> Iterator[Terminal]:
    shown = Terminal(*words, **variables)
    try:
        yield shown
    finally:
        shown.close()


def rows(raw: str, width: int) -> list[str]:
    """A terminal of this width; it knows the sequences that `Screen` uses."""
    shown: list[list[str]] = [[]]
    y = x = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", raw):
        if part in ("\r", "\n"):
            x = 0
            y += part == "\n"
        elif part[0] != "\x1b":
            y, x = (y + 1, 0) if x == width else (y, x)
            shown += [[] for _ in range(y + 1 - len(shown))]
            shown[y] += [" "] * (x + 1 - len(shown[y]))
            shown[y][x] = part
            x += 1
        elif part[-1] == "A":
            y -= int(part[2:-1])
        elif part == "\x1b[2K":
            shown[y:] = shown[y:] and [[]]
        else:
            assert part[-1] in "mhl", part
    return ["".join(row).rstrip() for row in shown]
