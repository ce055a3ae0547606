"""Shows an answer as it arrives: prints complete blocks and redraws only the last block."""

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

_MAX_DRAWN = 8000  # maximum number of characters to redraw
_FENCE = re.compile(r" {0,3}(```|~~~)[^\n]*\n")
_parser = MarkdownIt().enable("strikethrough").enable("table")


class HeadingLine(Heading):
    """A heading without a box, aligned to the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.stylize("bold")
        yield self.text


class _Blocks(Markdown):
    """Markdown with the model's line breaks, and with links shown as text and address."""

    elements = {**Markdown.elements, "heading_open": HeadingLine}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class AnswerPart(Protocol):
    """Formats the text of one channel. `take` splits off complete text; `draw` renders text."""

    def take(self, text: str) -> tuple[str, str]:
        """Return the part of the text that later text cannot change, and the rest of the text."""

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


class ReasoningPart:
    """Formats the model's reasoning as dimmed text."""

    def take(self, text: str) -> tuple[str, str]:
        settled, _, rest = text.rpartition("\n\n")
        return settled, rest

    def draw(self, text: str) -> RenderableType:
        return Text(text.strip("\n"), "dim")


class Call:
    """Formats a tool call as a card."""

    def __init__(self, name: str) -> None:
        self._name = name

    def take(self, text: str) -> tuple[str, str]:
        return "", text

    def draw(self, text: str) -> RenderableType:
        # The arguments may be incomplete or cut off.
        with contextlib.suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        title = Text(f"tool call: {self._name}", "bold")
        return Panel(Text(text), title=title, title_align="left", expand=False)


class _Bar(ProgressColumn):
    """A progress bar; empty while the total is unknown."""

    _bar = BarColumn(24)

    def render(self, task: Task) -> RenderableType:
        return self._bar.render(task) if task.total else Text("")


class _ProgressFigures(ProgressColumn):
    """The progress of a prompt: tokens done, cached, tokens per second, time left."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("told", ""), style="dim")


class LiveArea:
    """The redrawn area: the incomplete text and, below the text, the reason for a wait."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._part: AnswerPart = Content()
        self._rest = ""  # unprinted text of the current part
        self._has_printed = False
        self._wait: Progress | None = None

    def begin(self, part: AnswerPart) -> None:
        """Start another part."""
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
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                _Bar(),
                _ProgressFigures(),
            )
            self._wait = Progress(*columns, console=self._console, auto_refresh=False)
            self._wait.add_task(words, total=total)
        (task,) = self._wait.tasks
        # `Progress.update` cannot set a total back to None.
        task.total = total
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
        """Print complete text above the drawn area, after an empty line."""
        if not text.strip():
            return
        if self._has_printed:
            self._console.print()
        self._console.print(Segments([*_joined(self._rows(text)), Segment.line()]))
        self._has_printed = True

    def _rows(self, text: str) -> list[list[Segment]]:
        """Render text as rows. Remove empty rows at the start and the end, and trailing spaces."""
        rows = self._console.render_lines(self._part.draw(text), pad=False)
        for row in rows:
            while row and not row[-1].text.strip():
                row.pop()
        full = [number for number, row in enumerate(rows) if row]
        return rows[full[0] : full[-1] + 1] if full else []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the last rows that fit on the terminal."""
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
    """Return the text. If the text is too long to be redrawn, return only its end.

    The end of a code block keeps the block's opening fence, so that it is still drawn as code.
    """
    if len(text) <= _MAX_DRAWN:
        return text
    fence = _FENCE.match(text)
    return (fence[0] if fence else "") + text[-_MAX_DRAWN // 2 :]
