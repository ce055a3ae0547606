"""The log on stderr: lines for people or JSON, written by a thread, so that no reader stops us."""

import contextlib
import json
import logging
import queue
import shutil
import sys
import threading
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace_common.config.settings import ServerConfig
from headrace_common.log_context import KEY_NAME, REQUEST_ID

_MAX_WAITING = 10_000  # lines; more are lost, and counted
_ERASE = "\r\x1b[K"  # what stands on the terminal's line
_LAST_S = 2.0  # for the last lines at the end


def set_up(config: ServerConfig) -> None:
    """Sends all logging to stderr from now on, in the format that was asked for."""
    formatter = JsonLines() if config.log_format == "json" else TextLines()
    outlet = _Outlet()
    outlet.setFormatter(formatter)
    logging.basicConfig(level=config.log_level.upper(), handlers=[outlet], force=True)


def say(line: str, moves: bool = False) -> None:
    """A line to whoever started the server: between those of the log, in JSON as one of them.

    On a terminal the next line takes the place of one that `moves`. Control characters are escaped
    as in the log, for a line may have the name of a model or a folder in it.
    """
    outlets = [h for h in logging.getLogger().handlers if isinstance(h, _Outlet)]
    if outlets and isinstance(outlets[0].formatter, JsonLines):
        record = logging.LogRecord("headrace", logging.INFO, "", 0, line, None, None)
        outlets[0].write(outlets[0].format(record))
    elif outlets:
        outlets[0].write(_on_its_own(line), moves)
    else:
        _print(_on_its_own(line), moves)


def printable(name: str) -> str:
    """Return the name with unprintable characters, such as line breaks, escaped as in Python."""
    if name.isprintable():  # nearly every line of the log is
        return name
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in name)


def _on_its_own(text: str) -> str:
    return "\n    ".join(map(printable, text.split("\n")))


class TextLines(logging.Formatter):
    """Log lines as text: the message, then figures as name=value, then whose request it was."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Indent all lines but the first, and escape other control characters.

        Texts of clients and files would otherwise forge lines, or act on the reader's terminal.
        """
        return _on_its_own(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        for name, value in _about(record).items():
            if value is not None:
                line += f" {name}={_quoted(value) if isinstance(value, str) else value}"
        return line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _quoted(text: str) -> str:
    """Return the text, in quotes if it could be mistaken for the rest of the line."""
    is_plain = text.isprintable() and " " not in text and '"' not in text
    return text if is_plain else json.dumps(text)


def _about(record: logging.LogRecord) -> dict[str, Any]:
    """The record's own figures, and the request in whose context it was made."""
    about = dict(getattr(record, "fields", {}))
    for name, variable in (("request_id", REQUEST_ID), ("key", KEY_NAME)):
        if value := variable.get():
            about[name] = value
    return about


class _Outlet(logging.Handler):
    """Formats in the context of what is logged, and writes in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[tuple[str, bool] | threading.Event] = queue.Queue(_MAX_WAITING)
        self._num_lost = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(self.format(record))
        except Exception:  # a line is not worth a request
            self.handleError(record)

    def write(self, line: str, moves: bool = False) -> None:
        try:
            self._lines.put_nowait((line, moves))
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Waits a moment for the lines so far. Others may follow: libraries close all handlers."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put(written, timeout=_LAST_S)
            written.wait(_LAST_S)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
            else:
                _print(*line)
            if self._num_lost and self._lines.empty():
                lost, self._num_lost = self._num_lost, 0
                record = logging.LogRecord(
                    "headrace",
                    logging.WARNING,
                    "",
                    0,
                    f"{lost} lines of the log are lost",
                    None,
                    None,
                )
                _print(self.format(record))


def clear() -> None:
    """Takes a line that moves from the terminal."""
    if sys.stderr.isatty():
        _print("", moves=True)


def _print(line: str, moves: bool = False) -> None:
    """Prints to stderr, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        start, end = "", "\n"
        if sys.stderr.isatty():
            start = _ERASE
        if start and moves:  # what goes over the edge could not be erased
            line, end = line[: shutil.get_terminal_size().columns - 1], ""
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)
