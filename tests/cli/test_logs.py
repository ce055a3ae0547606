"""Lines of the log, and that nobody who does not read them can stop the server."""

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.cli import logs
from headrace_common.config.settings import ServerConfig
from headrace_common.log_context import KEY_NAME, REQUEST_ID, log_request
from tools.harness.eventually import eventually


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """The handlers and the level of the tests' own log."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(form: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three lines of a log: one of a request, one of a failure, and one that is said."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    logs.set_up(ServerConfig(log_format=form))  # type: ignore[arg-type]
    tokens = REQUEST_ID.set("mine"), KEY_NAME.set("ann")
    log_request("/v1/completions", "finished", ttft_ms=None, readers=2)
    REQUEST_ID.reset(tokens[0])
    KEY_NAME.reset(tokens[1])
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("headrace.x").exception("It failed")
    logs.say("ready")
    logging.getLogger().handlers[0].close()
    return stderr.getvalue().splitlines()


def test_json_lines_have_the_request_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in written("json", monkeypatch)]
    request, failure, said = lines
    assert request.pop("time").endswith("+00:00")
    assert request == {
        "level": "info",
        "logger": "headrace.requests",
        "message": "request",
        "route": "/v1/completions",
        "outcome": "finished",
        "ttft_ms": None,
        "readers": 2,
        "request_id": "mine",
        "key": "ann",
    }
    assert failure["level"] == "error" and "ValueError: two\nlines" in failure["exception"]
    assert "request_id" not in failure
    assert said["message"] == "ready"


def test_text_lines_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written("text", monkeypatch)
    assert lines[0].endswith(
        " INFO headrace.requests: request route=/v1/completions outcome=finished readers=2 "
        "request_id=mine key=ann"
    )
    assert "ERROR headrace.x: It failed" in lines[1]
    assert lines[-1] == "ready"


def test_a_name_that_a_client_sent_cannot_look_like_the_rest_of_a_line() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", None, None)
    record.fields = {"asked": "a outcome=finished\n2026"}
    line = logs.TextLines().format(record)
    assert line.endswith('request asked="a outcome=finished\\n2026"')


def test_a_text_of_a_client_or_a_file_cannot_look_like_a_line_of_its_own() -> None:
    forged = "a\n2026-11-26 02:00:00 INFO forged\r\x1b[2J\u2028b"
    try:
        raise ValueError(forged)
    except ValueError:
        fault = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "", 0, "No model %s", (forged,), fault)
    first, *others = logs.TextLines().format(record).splitlines()
    assert first.endswith("ERROR x: No model a")
    assert others[0] == "    2026-11-26 02:00:00 INFO forged\\r\\x1b[2J\\u2028b"
    assert "    ValueError: a" in others and all(line.startswith("    ") for line in others)


def test_a_log_that_nobody_reads_stops_nothing_and_says_what_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck(io.StringIO):
        can_write = threading.Event()

        def write(self, text: str) -> int:
            self.can_write.wait(60)
            return super().write(text)

    stderr = Stuck()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logs, "_MAX_WAITING", 10)
    logs.set_up(ServerConfig())
    for number in range(100):
        logging.getLogger("headrace.x").warning("line %s", number)
    stderr.can_write.set()
    eventually(lambda: "log lines were dropped" in stderr.getvalue())
    shown = stderr.getvalue()
    assert "line 0" in shown and "line 99" not in shown, shown


def test_a_name_in_a_line_for_the_terminal_cannot_act_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "No model \x1b[2J\r\x07a\nheadrace: forged"
    logs.say(said)
    shown = "No model \\x1b[2J\\r\\x07a\n    headrace: forged\n"
    assert capsys.readouterr().err == shown
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    logs.set_up(ServerConfig())
    logs.say(said)
    logging.getLogger().handlers[0].close()
    assert stderr.getvalue() == shown


def test_a_line_on_a_terminal_takes_the_place_of_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.say("ready")
    assert capsys.readouterr().err == "ready\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logs.say("ready")
    assert capsys.readouterr().err == "\r\x1b[Kready\n"
