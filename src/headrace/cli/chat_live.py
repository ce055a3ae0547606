"""An answer on a terminal as it comes: whole blocks are printed, the last one is drawn anew."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Protocol

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.segment import Segment, Segments
from rich.text import Text

_MAX_DRAWN = 8000  # characters that are drawn anew, each time
_FENCE = re.compile(r" {0,3}(```|~~~)[^\n]*\n")
_parser = MarkdownIt().enable("strikethrough").enable("table")


class HeadingLine(Heading):
    """A heading without a box, at the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.stylize("bold")
        yield self.text


class _Blocks(Markdown):
    """Lines end where the model ended them, and a link shows where it leads."""

    elements = {**Markdown.elements, "heading_open": HeadingLine}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class AnswerPart(Protocol):
    """A run of one channel: `take` gives what of its text is settled, `draw` makes it seen."""

    def take(self, text: str) -> tuple[str, str]:
        """Splits the text into what no further text can change, and the rest."""

    def draw(self, text: str) -> RenderableType: ...


class Content:
    def take(self, text: str) -> tuple[str, str]:
        starts = [it.map[0] for it in _parser.parse(text) if it.level == 0 and it.map]
        if not starts or not starts[-1]:
            return "", text
        lines = text.split("\n")
        return "\n".join(lines[: starts[-1]]), "\n".join(lines[starts[-1] :])

    def draw(self, text: str) -> RenderableType:
        return _Blocks(text)


class Aside:
    """Reasoning."""

    def take(self, text: str) -> tuple[str, str]:
        settled, _, rest = text.rpartition("\n\n")
        return settled, rest

    def draw(self, text: str) -> RenderableType:
        return Text(text.strip("\n"), "dim")


class Call:
    """A tool call, as a card."""

    def __init__(self, name: str) -> None:
        self._name = name

    def take(self, text: str) -> tuple[str, str]:
        return "", text

    def draw(self, text: str) -> RenderableType:
        with contextlib.suppress(ValueError):  # not whole yet, or cut
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        title = Text(f"tool call: {self._name}", "bold")
        return Panel(Text(text), title=title, title_align="left", expand=False)


class _Bar(ProgressColumn):
    """Empty while the end is unknown."""

    _bar = BarColumn(24)

    def render(self, task: Task) -> RenderableType:
        return self._bar.render(task) if task.total else Text("")


class _Told(ProgressColumn):
    """Tokens done, share that was cached, tokens a second, seconds left."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("told", ""), style="dim")


class LiveArea:
    """The part under way, and below it why nothing comes; `end` leaves what is settled."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._part: AnswerPart = Content()
        self._rest = ""  # of the part, not settled
        self._has_printed = False
        self._wait: Progress | None = None

    def begin(self, part: AnswerPart) -> None:
        """Another part than before."""
        self._print(self._rest)
        self._part, self._rest = part, ""

    def add(self, text: str) -> None:
        self._wait = None
        self._rest += text
        if "\n" in text:
            settled, self._rest = self._part.take(self._rest)
            self._print(settled)
        self._show()

    def wait(self, words: str, done: int = 0, total: int | None = None, told: str = "") -> None:
        if self._wait is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(), _Told())
            self._wait = Progress(*columns, console=self._console, auto_refresh=False)
            self._wait.add_task(words, total=total)
        (task,) = self._wait.tasks
        task.total = total  # of a task that has one, `update` would not take it away
        self._wait.update(task.id, description=words, completed=done, told=told)
        self._show()

    def end(self) -> None:
        self._wait = None
        rest, self._rest = self._rest, ""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(rest)
        self._has_printed = False

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(
                self, console=self._console, transient=True, refresh_per_second=8,
                redirect_stdout=False, redirect_stderr=False, vertical_overflow="visible",
            )  # fmt: skip
            self._live.start(refresh=True)

    def _print(self, text: str) -> None:
        """Leaves a settled text above what is drawn, an empty line after the one before."""
        if not text.strip():
            return
        if self._has_printed:
            self._console.print()
        self._console.print(Segments([*_joined(self._rows(text)), Segment.line()]))
        self._has_printed = True

    def _rows(self, text: str) -> list[list[Segment]]:
        """The part as rows, without empty ones around them and spaces behind them."""
        rows = self._console.render_lines(self._part.draw(text), pad=False)
        for row in rows:
            while row and not row[-1].text.strip():
                row.pop()
        full = [number for number, row in enumerate(rows) if row]
        return rows[full[0] : full[-1] + 1] if full else []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The last rows of it, as many as there is room for."""
        rows = self._rows(_end_of(self._rest))
        if rows and self._has_printed:
            rows.insert(0, [])
        if (wait := self._wait) is not None:
            rows += console.render_lines(wait.get_renderable(), options, pad=False)
        yield from _joined(rows[-max(console.size.height - 2, 1) :])


def _joined(lines: list[list[Segment]]) -> Iterator[Segment]:
    for number, line in enumerate(lines):
        if number:
            yield Segment.line()
        yield from line


def _end_of(text: str) -> str:
    """So much of a long block as may be seen; code stays code."""
    if len(text) <= _MAX_DRAWN:
        return text
    fence = _FENCE.match(text)
    return (fence[0] if fence else "") + text[-_MAX_DRAWN // 2 :]
