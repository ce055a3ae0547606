"""Runs a program in a terminal of 100 columns and 30 rows, and records its output."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

ROWS, COLUMNS = 30, 100


def run_in_terminal(
    command: list[str], cwd: Path, environment: dict[str, str], record: Path, within_s: float
) -> int:
    """Run `command` until it ends; write its output to `record`; return its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**environment, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    ends_at = time.monotonic() + within_s
    record.parent.mkdir(parents=True, exist_ok=True)
    try:
        with record.open("wb") as file:
            while process.poll() is None or select.select([ours], [], [], 0)[0]:
                assert time.monotonic() < ends_at, record.read_text(errors="replace")[-3000:]
                if not select.select([ours], [], [], 1)[0]:
                    continue
                try:
                    data = os.read(ours, 65536)
                except OSError:  # the program has closed its end
                    break
                file.write(data)
                file.flush()
        return process.wait(10)
    finally:
        process.kill()
        os.close(ours)
