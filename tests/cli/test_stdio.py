"""Standard streams that are closed, or in another encoding than most."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.stdio import make_usable, read_stdin
from headrace_common.errors import ConfigError
from tests.client.builders import STREAM, Given, accepted, finish, listed_server, tokens

ANSWER = (
    Given(headers={"x-stream-id": STREAM}),
    Given(body=accepted() + tokens(1, "caf\u00e9 \u2192 ok") + finish(2)),
)


def test_what_is_no_text_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    with pytest.raises(ConfigError, match=r"stdin is not utf-8 \(byte 3: 0xe9\); convert it"):
        read_stdin()


def test_closed_streams_are_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    make_usable()
    assert sys.stdin.read() == "" and not sys.stdin.isatty()
    assert sys.stdout.write("gone") and sys.stderr.write("gone")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_an_answer_comes_whole_in_an_encoding_without_all_of_its_characters(
    tmp_path: Path,
) -> None:
    with listed_server(*ANSWER) as server:
        shown = subprocess.run(
            [sys.executable, "-m", "headrace", "chat", "--url", server.url],
            env={**os.environ, "PYTHONIOENCODING": "latin-1", "XDG_STATE_HOME": str(tmp_path)},
            input=b"hi\n",
            capture_output=True,
            timeout=120,
        )
    assert (shown.stdout, shown.returncode) == (b"caf\xe9 ? ok\n", 0), shown.stderr
    assert not [path for path in server.asked if path.endswith("cancel")]
