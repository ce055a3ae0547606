"""The output of `headrace chat`: text goes to stdout, everything else to stderr."""

import os
import sys

from rich.console import Console
from rich.text import Text

from headrace.cli.chat_live import Call, Content, LiveArea, ReasoningPart
from headrace.cli.stdio import printed, tame
from headrace.client import events
from headrace.client.events import TextPiece, Update
from headrace_common.loading import duration, time_left


def told(event: events.Progress) -> str:
    """Describe a prompt's progress."""
    parts = [f"{event.processed:,} of {event.total:,} tokens"]
    if event.cache:
        parts.append(f"{100 * event.cache // event.total} % cached")
    computed = event.processed - event.cache
    if computed > 0 and event.time_ms > 0:
        seconds = event.time_ms / 1000
        parts.append(f"{computed / seconds:,.0f} tokens/s")
        return ", ".join(parts) + time_left(computed, event.total - event.cache, seconds)
    return ", ".join(parts)


def place(event: events.Queued) -> str:
    """Describe a position in the queue."""
    wait = f", about {duration(event.eta_ms / 1000)}" if event.eta_ms else ""
    return f"waiting: position {event.position} of {event.waiting} in the queue{wait}"


def recovery(event: events.Heartbeat) -> str:
    """Describe the restart of an engine."""
    again = f" (attempt {event.attempt})" if (event.attempt or 1) > 1 else ""
    return f"the engine is restarting{again}; the answer continues when it is back"


def load(event: events.Heartbeat) -> str:
    """Describe the progress of the load that a heartbeat reports."""
    share = "" if event.progress is None else f": {100 * event.progress:.0f} %"
    return f"{event.stage or 'loading the model'}{share}"


class Screen:
    """Shows a chat. A terminal shows Markdown, reasoning and tool calls as they arrive.

    In a file, or on a terminal that cannot move its cursor, text is written unchanged.
    """

    def __init__(self) -> None:
        self._errors = Console(stderr=True, highlight=False)
        output = Console(highlight=False)
        self._is_drawn = _can_draw(output)
        area = output if self._is_drawn else self._errors
        self._area = LiveArea(area) if _can_draw(area) else None
        self._part = ("", 0)  # channel and tool call of the last piece
        # True if the last line on stdout is unfinished.
        self._has_line = False

    def tell(self, text: str) -> None:
        """Show a message from the program. A terminal gets no line breaks inside words."""
        is_whole = not self._errors.is_terminal
        self._errors.print(text, style="dim", markup=False, soft_wrap=is_whole)

    def show(self, event: Update) -> None:
        match event:
            case events.Queued():
                self._wait(place(event))
            case events.Progress(processed=done, total=total) if done < total:
                self._wait("processing the prompt", done, total, told(event))
            case events.Heartbeat(state="recovering"):
                self._wait(recovery(event))
            case events.Heartbeat(state="loading"):
                self._wait(load(event))
            case events.Tokens(choice=0):
                for piece in event.pieces:
                    self._say(piece)

    def trouble(self, reason: str, pause_s: float) -> None:
        """Show the reason for the failure, and in how many seconds the client retries."""
        self._wait(f"{reason}; trying again in {pause_s:.1f} s")

    def note(self, text: str) -> None:
        """Show a remark about an incomplete answer."""
        self.end_answer()
        self._errors.print(f"[{text}]", style="dim", markup=False, soft_wrap=True)

    def recall(self, role: str, text: str) -> None:
        """Show an earlier message."""
        shown = f"> {text}" if role == "user" else text
        self._errors.print(tame(shown), style="dim", markup=False)

    def end_answer(self) -> None:
        if self._area is not None:
            self._area.end()
        self._end_line()
        self._part = ("", 0)

    close = end_answer

    def _say(self, piece: TextPiece) -> None:
        part, is_aside = (piece.channel, piece.call), piece.channel != "content"
        if not (piece.text or piece.name):
            return
        is_new, self._part = part != self._part, part
        if self._area is not None and (is_aside or self._is_drawn):
            if is_new:
                call = Call(tame(piece.name)) if piece.call >= 0 else None
                self._area.begin(call or (ReasoningPart() if is_aside else Content()))
            self._area.add(tame(piece.text))
        elif is_aside:
            self._say_aside(piece, is_new)
        else:
            if self._area is not None:
                self._area.end()
            sys.stdout.write(printed(piece.text))
            sys.stdout.flush()
            self._has_line = not piece.text.endswith("\n")

    def _say_aside(self, piece: TextPiece, is_new: bool) -> None:
        """Write reasoning or a tool call on a terminal that cannot redraw lines."""
        if not self._errors.is_terminal:
            return
        if is_new:
            self._end_line()
        text = f"tool call: {piece.name} {piece.text}" if piece.name else piece.text
        self._errors.print(Text(tame(text), "dim"), end="", soft_wrap=True)
        self._has_line = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._has_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._has_line = False

    def _wait(self, text: str, done: int = 0, total: int | None = None, told: str = "") -> None:
        """Show one line below the text until more text arrives."""
        if self._area is not None:
            self._area.wait(text, done, total, told)


def _can_draw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and bool(os.environ.get("TERM"))
