"""Writes the log to stderr as text or JSON, in a thread, so that a slow reader blocks nothing."""

import contextlib
import json
import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace_common.config.settings import ServerConfig
from headrace_common.load_bar import can_redraw
from headrace_common.log_context import KEY_NAME, REQUEST_ID

# The maximum number of waiting lines. Later lines are dropped and counted.
_MAX_WAITING = 10_000
# This sequence clears the terminal's current line, which may show a progress bar.
_ERASE = "\r\x1b[K"
# The maximum number of seconds for writing the last lines at exit.
_LAST_S = 2.0


def set_up(config: ServerConfig) -> None:
    """Send all logging to stderr in the configured format."""
    formatter = JsonLines() if config.log_format == "json" else TextLines()
    outlet = _Outlet()
    outlet.setFormatter(formatter)
    logging.basicConfig(level=config.log_level.upper(), handlers=[outlet], force=True)


def say(line: str) -> None:
    """Show a line to the person who started the server, between the lines of the log.

    As in the log, control characters are escaped, because the name of a model or folder may contain
    them. With the JSON format, the line is an entry of the log.
    """
    outlet = _outlet()
    if outlet is None:
        _print(_escaped(line))
    elif isinstance(outlet.formatter, JsonLines):
        record = logging.LogRecord("headrace", logging.INFO, "", 0, line, None, None)
        outlet.write(outlet.format(record))
    else:
        outlet.write(_escaped(line))


def can_show_bar() -> bool:
    """Return whether stderr is a terminal that can redraw a line, and has no log in JSON."""
    outlet = _outlet()
    is_json = outlet is not None and isinstance(outlet.formatter, JsonLines)
    return not is_json and can_redraw()


def _outlet() -> "_Outlet | None":
    outlets = (it for it in logging.getLogger().handlers if isinstance(it, _Outlet))
    return next(outlets, None)


def printable(name: str) -> str:
    """Return the name with unprintable characters, such as line breaks, escaped as in Python."""
    # Nearly every name is printable.
    if name.isprintable():
        return name
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in name)


def _escaped(text: str) -> str:
    """Return the text with its control characters escaped and all lines but the first indented."""
    return "\n    ".join(map(printable, text.split("\n")))


class TextLines(logging.Formatter):
    """Formats log lines as text: the message, its fields as name=value, and the request's id."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Indent all lines but the first, and escape other control characters.

        Otherwise texts from clients and files could forge lines or control the reader's terminal.
        """
        return _escaped(super().format(record))

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
    """Return the text, in quotes if a reader could confuse it with the next field."""
    is_plain = text.isprintable() and " " not in text and '"' not in text
    return text if is_plain else json.dumps(text)


def _about(record: logging.LogRecord) -> dict[str, Any]:
    """Return the record's own fields, the id of the current request, and the name of its key."""
    about = dict(getattr(record, "fields", {}))
    for name, variable in (("request_id", REQUEST_ID), ("key", KEY_NAME)):
        if value := variable.get():
            about[name] = value
    return about


class _Outlet(logging.Handler):
    """Formats a record in the logging thread and writes the record in a separate thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | threading.Event] = queue.Queue(_MAX_WAITING)
        self._num_lost = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(self.format(record))
        # A log line that fails must not fail a request.
        except Exception:
            self.handleError(record)

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Wait up to 2 s until the lines so far are written.

        Libraries may close all handlers early, so more lines may follow.
        """
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
                _print(line)
            if self._num_lost and self._lines.empty():
                lost, self._num_lost = self._num_lost, 0
                record = logging.LogRecord(
                    "headrace",
                    logging.WARNING,
                    "",
                    0,
                    f"{lost} log lines were dropped, because stderr was too slow",
                    None,
                    None,
                )
                _print(self.format(record))


def _print(line: str) -> None:
    """Print to stderr. Ignore errors, because stderr can be closed."""
    with contextlib.suppress(OSError, ValueError):
        start = _ERASE if sys.stderr.isatty() else ""
        # One write, because another thread may redraw a progress bar in between.
        sys.stderr.write(f"{start}{line}\n")
        sys.stderr.flush()
