"""The screen of `headrace chat`: text on stdout, all else on stderr, bars on terminals only."""

import os
import sys

from rich.console import Console
from rich.text import Text

from headrace.cli.chat_live import Aside, Call, Content, LiveArea
from headrace.cli.stdio import printed, tame
from headrace.client import events
from headrace.client.events import TextPiece, Update


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
    """On a terminal the answer is Markdown that is drawn as it comes, with reasoning and calls.

    Where it goes into a file, or the terminal cannot move its cursor, its text is written as it is.
    """

    def __init__(self) -> None:
        self._errors = Console(stderr=True, highlight=False)
        output = Console(highlight=False)
        self._is_drawn = _can_draw(output)
        area = output if self._is_drawn else self._errors
        self._area = LiveArea(area) if _can_draw(area) else None
        self._part = ("", 0)  # channel and tool call of the last piece
        self._has_line = False  # on stdout, without its end

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
                self._area.begin(call or (Aside() if is_aside else Content()))
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
        """On a terminal that cannot draw."""
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
        """One line below the text that updates until more comes."""
        if self._area is not None:
            self._area.wait(text, done, total, told)


def _can_draw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and bool(os.environ.get("TERM"))
