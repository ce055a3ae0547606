"""The screen of `headrace chat`: text on stdout, all else on stderr, bars on terminals only."""

import re
import sys
from typing import IO

from rich.cells import chop_cells
from rich.console import Console, RenderableType
from rich.control import Control
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from headrace.client import events
from headrace.client.events import TextPiece, Update

# A model's words must not move the cursor, or worse.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Bar(ProgressColumn):
    """Empty while the end is unknown."""

    _bar = BarColumn(24)

    def render(self, task: Task) -> RenderableType:
        return self._bar.render(task) if task.total else Text("")


class _Rate(ProgressColumn):
    """Tokens done, share that was cached, tokens a second, seconds left."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("told", ""), style="dim")


def _tame(text: str) -> str:
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def told(event: events.Progress) -> str:
    """A prompt's progress in words."""
    parts = [f"{event.processed:,} of {event.total:,} tokens"]
    if event.cache:
        parts.append(f"{100 * event.cache // event.total} % cached")
    computed = event.processed - event.cache
    if computed > 0 and event.time_ms > 0:
        rate = computed / event.time_ms * 1000
        parts.append(f"{rate:,.0f} tokens/s")
        if left := event.total - event.processed:
            parts.append(f"{left / rate:,.0f} s left")
    return ", ".join(parts)


def place(event: events.Queued) -> str:
    """A place in the queue in words."""
    wait = f", about {event.eta_ms / 1000:.0f} s" if event.eta_ms else ""
    return f"waiting: place {event.position} of {event.waiting}{wait}"


def recovery(event: events.Heartbeat) -> str:
    """An engine that is being restarted, in words."""
    again = f" (attempt {event.attempt})" if (event.attempt or 1) > 1 else ""
    return f"the engine is starting again{again}; the answer goes on when it is back"


def load(event: events.Heartbeat) -> str:
    """A model that is being loaded, in words."""
    share = "" if event.progress is None else f": {100 * event.progress:.0f} %"
    return f"{event.stage or 'loading the model'}{share}"


class Screen:
    """Without a terminal only the text of answers appears; reasoning and tool calls are dimmed."""

    def __init__(self) -> None:
        self._errors = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._line = ""  # what the last line of an answer has so far
        self._target: IO[str] = sys.stdout  # where it stands
        self._part = ("", 0)  # channel and tool call that it is of
        self._is_seen = sys.stdout.isatty()

    def tell(self, text: str) -> None:
        """Something outside the conversation."""
        self._errors.print(text, style="dim", markup=False, soft_wrap=True)

    def show(self, event: Update) -> None:
        match event:
            case events.Queued():
                self._wait(place(event))
            case events.Progress(processed=done, total=total) if done < total:
                self._wait("reading the prompt", done, total, told(event))
            case events.Heartbeat(state="recovering"):
                self._wait(recovery(event))
            case events.Heartbeat(state="loading"):
                self._wait(load(event))
            case events.Tokens(choice=0):
                for piece in event.pieces:
                    self._say(piece)

    def trouble(self, reason: str, pause_s: float) -> None:
        """The connection or the server is away; a running stream is not lost."""
        self._wait(f"{reason}; trying again in {pause_s:.1f} s")

    def note(self, text: str) -> None:
        """A remark about an answer that is not whole."""
        self.end_answer()
        self._errors.print(f"[{text}]", style="dim", markup=False, soft_wrap=True)

    def recall(self, role: str, text: str) -> None:
        """An earlier message."""
        self._errors.print(f"> {text}" if role == "user" else text, style="dim", markup=False)

    def end_answer(self) -> None:
        self._clear()
        self._end_line()

    def _say(self, piece: TextPiece) -> None:
        is_aside = piece.channel != "content"
        text = f"tool call: {piece.name} {piece.text}" if piece.name else piece.text
        if not text or (is_aside and not self._errors.is_terminal):
            return
        self._clear()
        if self._part != (piece.channel, piece.call):
            self._end_line()
            self._part = (piece.channel, piece.call)
        self._write(text, is_aside)
        self._target = self._errors.file if is_aside else sys.stdout
        self._line = (self._line + text).rpartition("\n")[2]

    def _write(self, text: str, is_aside: bool) -> None:
        if is_aside:
            self._errors.print(Text(_tame(text), "dim"), end="", soft_wrap=True)
        else:
            sys.stdout.write(_tame(text) if self._is_seen else text)
            sys.stdout.flush()

    def _end_line(self) -> None:
        if self._line:
            self._target.write("\n")
            self._target.flush()
        self._line = ""

    def _wait(self, text: str, done: int = 0, total: int | None = None, told: str = "") -> None:
        """One line below the text that updates until more comes."""
        if not self._errors.is_terminal or self._errors.is_dumb_terminal:
            return
        if self._bar is None:
            self._leave_line()
            columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(), _Rate())
            self._bar = Progress(*columns, console=self._errors, transient=True)
            self._bar.add_task(text, total=total)
            self._bar.start()
        (task,) = self._bar.tasks
        task.total = total  # of a task that has one, `update` would not take it away
        self._bar.update(task.id, description=text, completed=done, told=told)

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._return_to_line()

    def _leave_line(self) -> None:
        if self._line and self._target.isatty():
            self._target.write("\n")
            self._target.flush()

    def _return_to_line(self) -> None:
        """Shows the line's last row where it stands, so that the cursor is behind it again."""
        if self._line and self._target.isatty():
            *_, row = chop_cells(_tame(self._line).expandtabs(8), self._errors.width)
            self._errors.control(Control.move(0, -1))
            self._write(row, is_aside=self._target is not sys.stdout)
