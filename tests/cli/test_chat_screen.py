"""The screen of `headrace chat`, on a terminal that a test plays."""

import contextlib
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from headrace.cli.chat_command import _greet
from headrace.cli.chat_commands import HELP
from headrace.cli.chat_screen import Screen
from headrace.client.errors import Refused
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


@pytest.mark.parametrize("name", ["tiny", "someone/a-rather-long-name-of-a-model-0.6B-GGUF"])
def test_the_greeting_has_no_break_inside_a_word(
    name: str, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", played.end)
    client = SimpleNamespace(models=lambda: [name], model=lambda _: {"max_model_len": 40960})
    _greet(client, Screen(), {})  # type: ignore[arg-type]
    shown = played.rows()
    assert " ".join(shown).split() == [
        *f"{name}, context 40,960 tokens. Type /help for help.".split()
    ]
    assert all(len(row) <= WIDTH for row in shown)


def test_a_server_that_does_not_tell_the_context_is_greeted_without_it(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise Refused(404, "Not found", "not_found")

    monkeypatch.setattr("sys.stderr", played.end)
    for model in (lambda _: {"max_model_len": None}, lambda _: {}, refuse):
        client = SimpleNamespace(models=lambda: ["tiny"], model=model)
        _greet(client, Screen(), {})  # type: ignore[arg-type]
    assert played.rows()[:3] == ["tiny. Type /help for help."] * 3


def test_each_line_of_the_help_fits_on_80_columns() -> None:
    assert max(map(len, HELP.splitlines())) < 80
