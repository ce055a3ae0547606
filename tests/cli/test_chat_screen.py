"""The screen of `headrace chat`, on a terminal that a test plays."""

import contextlib
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from headrace.cli.chat_screen import Screen
from headrace.client.events import TextPiece, Tokens
from tests.cli.terminal import rows

WIDTH = 60


class Played:
    """A terminal with an end for the program; `rows` is what it shows."""

    def __init__(self, ours: int, end: TextIO) -> None:
        self._ours, self.end = ours, end

    def rows(self) -> list[str]:
        raw = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                raw += os.read(self._ours, 65536)
        return rows(raw.decode(), WIDTH)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    with open(theirs, "w", encoding="utf-8") as end:
        yield Played(ours, end)
    os.close(ours)


def tokens(text: str, channel: str = "content") -> Tokens:
    return Tokens(seq=1, at_ms=0, choice=0, pieces=[TextPiece(text, channel=channel)])


def wrapped(text: str) -> list[str]:
    return [line[at : at + WIDTH] for line in text.split("\n") for at in range(0, len(line), WIDTH)]


@pytest.mark.parametrize("begun", ["It was a won", "x" * WIDTH, "Two\nlines and a", "y" * 100])
@pytest.mark.parametrize(
    ("channel", "term"), [("content", "xterm"), ("reasoning", "xterm"), ("content", "dumb")]
)
def test_a_lost_connection_leaves_no_break_in_the_text(
    begun: str, channel: str, term: str, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stdout", played.end)
    monkeypatch.setattr("sys.stderr", played.end)
    screen = Screen()
    screen.show(tokens(begun, channel))
    screen.trouble("the connection was lost", 0.2)
    screen.trouble("the connection was lost", 0.4)
    screen.show(tokens("derful day.", channel))
    screen.end_answer()
    played.end.write("> ")
    played.end.flush()
    assert played.rows() == [*wrapped(begun + "derful day."), ">"]


def test_a_lost_connection_leaves_no_break_in_a_file(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", played.end)
    with open(tmp_path / "answer", "w") as answer:
        monkeypatch.setattr("sys.stdout", answer)
        screen = Screen()
        screen.show(tokens("It was a won"))
        screen.trouble("the connection was lost", 0.2)
        screen.show(tokens("derful day."))
        screen.end_answer()
    assert (tmp_path / "answer").read_text() == "It was a wonderful day.\n"
