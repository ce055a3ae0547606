"""The keyboard of `headrace chat`: reads messages of several lines.

Keys that the user presses between two prompts are kept for the next prompt.
"""

import contextlib
import os
import sys
import termios
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_PROMPT, _MORE = "> ", "  "


class Keyboard:
    """Reads messages with `ask`, a function of the prompt and an initial text.

    `typed` returns the text that was in the input line when Ctrl-C was pressed.
    """

    def __init__(self, ask: Callable[[str, str], str], typed: Callable[[], str]) -> None:
        self._ask, self._typed = ask, typed

    def read(self, prompt: str = _PROMPT, default: str = "") -> str | None:
        """Read the user's message. Returns None after Ctrl-D.

        Ctrl-C clears the input line. On an empty line, Ctrl-C raises KeyboardInterrupt.
        """
        while True:
            try:
                return self._ask(prompt, default).lstrip("\n").rstrip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._typed():
                    raise
                default = ""


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard | None]:
    """Open the keyboard. Yields None if stdin is not a terminal."""
    # stdout may be a file, so the prompt may have to go to stderr.
    seen = next((end for end in (sys.stdout, sys.stderr) if end.isatty()), None)
    if not sys.stdin.isatty():
        yield None
    elif seen is None or os.environ.get("TERM") in (None, "", "dumb", "unknown"):
        yield _plain_keyboard()
    else:
        with _edited_keyboard(seen) as edited:
            yield edited


def _plain_keyboard() -> Keyboard:
    """Return the keyboard of a terminal that cannot move its cursor."""
    try:
        import readline
    except ImportError:
        typed: Callable[[], str] = str
    else:
        typed = readline.get_line_buffer

    def ask(prompt: str, default: str) -> str:
        # The line cannot be edited here, so the user has to type the text again.
        if default:
            print(f"not sent: {default}", file=sys.stderr)
        try:
            text = input(prompt)
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{input(_MORE)}"
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            raise
        return text

    return Keyboard(ask, typed)


@contextlib.contextmanager
def _edited_keyboard(seen: TextIO) -> Iterator[Keyboard]:
    """Hide keys pressed between two prompts. The terminal keeps the keys for the next prompt."""
    session = _session(seen)
    usual = termios.tcgetattr(sys.stdin)

    def hold() -> None:
        held = termios.tcgetattr(sys.stdin)
        # Enter then differs from a pasted line break.
        held[0] &= ~termios.ICRNL
        held[3] &= ~(termios.ECHO | termios.ICANON)
        # After Ctrl-C, the terminal keeps the typed text.
        held[3] |= termios.NOFLSH
        held[6][termios.VMIN], held[6][termios.VTIME] = 1, 0
        termios.tcsetattr(sys.stdin, termios.TCSANOW, held)
        # Each prompt switches bracketed paste off, so switch it on again.
        session.output.enable_bracketed_paste()
        session.output.flush()

    def ask(prompt: str, default: str) -> str:
        try:
            return session.prompt(prompt, default=default)
        finally:
            hold()

    hold()
    try:
        yield Keyboard(ask, lambda: session.default_buffer.text)
    finally:
        session.output.disable_bracketed_paste()
        session.output.flush()
        termios.tcsetattr(sys.stdin, termios.TCSANOW, usual)


def _session(seen: TextIO) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.data_structures import Size
    from prompt_toolkit.output.vt100 import Vt100_Output

    def size() -> Size:
        columns, rows = os.get_terminal_size(seen.fileno())
        return Size(rows or 24, columns or 80)

    return PromptSession(
        # Do not ask for the cursor's position: programs that simulate a terminal do not answer.
        output=Vt100_Output(seen, size, term=os.environ["TERM"], enable_cpr=False),
        multiline=True,
        prompt_continuation=_MORE,
        key_bindings=_keys(),
        enable_suspend=True,
    )


def _keys() -> "KeyBindings":
    """Return the key bindings: Enter sends the message; Alt-Enter starts a new line.

    Enter after a backslash also starts a new line.
    """
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: "KeyPressEvent") -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    return keys
