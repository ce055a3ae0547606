"""The keyboard of `headrace chat`: messages of several lines, and keys that come early."""

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
    """`ask` reads a message, and `typed` tells what of it was there when Ctrl-C came.

    `ask` gets the prompt, and the text that is there to begin with.
    """

    def __init__(self, ask: Callable[[str, str], str], typed: Callable[[], str]) -> None:
        self._ask, self._typed = ask, typed

    def read(self, prompt: str = _PROMPT, default: str = "") -> str | None:
        """Reads the user's message; None when they leave with Ctrl-D.

        Ctrl-C clears what is typed; where nothing is, it is a KeyboardInterrupt.
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
    """Opens the keyboard; None if nobody types: what is piped in is one message."""
    # answers may go into a file
    seen = next((end for end in (sys.stdout, sys.stderr) if end.isatty()), None)
    if not sys.stdin.isatty():
        yield None
    elif seen is None or os.environ.get("TERM") in (None, "", "dumb", "unknown"):
        yield _plain_keyboard()
    else:
        with _edited_keyboard(seen) as edited:
            yield edited


def _plain_keyboard() -> Keyboard:
    """The keyboard for a terminal that cannot move its cursor."""
    try:
        import readline
    except ImportError:
        typed: Callable[[], str] = str
    else:
        typed = readline.get_line_buffer

    def ask(prompt: str, default: str) -> str:
        if default:  # it cannot be typed for its user
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
    """Between prompts keys are not shown; the terminal keeps them for the next one."""
    session = _session(seen)
    usual = termios.tcgetattr(sys.stdin)

    def hold() -> None:
        held = termios.tcgetattr(sys.stdin)
        held[0] &= ~termios.ICRNL  # Enter stays another key than a line's end that is pasted
        held[3] &= ~(termios.ECHO | termios.ICANON)
        held[3] |= termios.NOFLSH  # Ctrl-C ends an answer, and not what was typed during it
        held[6][termios.VMIN], held[6][termios.VTIME] = 1, 0
        termios.tcsetattr(sys.stdin, termios.TCSANOW, held)
        session.output.enable_bracketed_paste()  # each prompt ends it
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
        # not asked where its cursor is: programs that play a terminal do not answer
        output=Vt100_Output(seen, size, term=os.environ["TERM"], enable_cpr=False),
        multiline=True,
        prompt_continuation=_MORE,
        key_bindings=_keys(),
        enable_suspend=True,
    )


def _keys() -> "KeyBindings":
    """Enter sends, or breaks the line behind a backslash; Alt-Enter breaks it anywhere."""
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
