"""The lines that are no messages: the commands of `headrace chat`."""

import re
from collections.abc import Callable

from headrace.cli.chat import ChatLoop
from headrace.cli.chat_files import read_attachment
from headrace.cli.chat_screen import Screen
from headrace.cli.chat_store import Transcripts, table
from headrace_common.errors import ConfigError

HELP = """\
/new        begins a new conversation
/again      asks the last question once more
/list       shows the conversations that are kept
/open N     goes on with one of them
/file PATH  attaches a text or an image to the next message; /file alone lets go of all
/help       shows this
/exit       leaves, as Ctrl-D does
Enter sends; Alt-Enter, or a backslash before Enter, begins another line.
Ctrl-C stops an answer, or clears what is typed.
What is typed during an answer waits for its end.
A tool call's result is typed after it; Ctrl-C leaves it without one."""
_COMMAND = re.compile(r"/[a-z]+")


class Commands:
    """`sees` tells whether the model takes images; it is asked once a file is attached."""

    def __init__(
        self, chat: ChatLoop, screen: Screen, kept: Transcripts, sees: Callable[[], bool]
    ) -> None:
        self._chat, self._screen, self._kept, self._sees = chat, screen, kept, sees

    def do(self, line: str) -> None:
        """A command, or a message for the model."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        takes_one = {"/open": self._open, "/file": self._file}
        takes_none = {
            "/help": lambda: self._screen.tell(HELP),
            "/new": self._chat.start_anew,
            "/again": self._chat.again,
            "/list": self._list,
        }
        if not word:
            self._chat.read_on()
        elif word in takes_one:
            try:
                takes_one[word](rest)
            except ConfigError as error:
                self._screen.note(str(error))
        elif word in (*takes_none, "/exit", "/quit"):
            if rest:
                self._screen.note(f"{word} takes nothing after it; leave it out")
            else:
                takes_none[word]()
        elif _COMMAND.fullmatch(word) and not rest:
            self._screen.note(f"{word} is not a command; /help lists them")
        else:
            self._chat.ask(line)

    def _list(self) -> None:
        self._screen.tell("\n".join(table(self._kept.listed())) or "none is kept yet")

    def _open(self, number: str) -> None:
        if not number.isdecimal():
            raise ConfigError("/open takes the number of a conversation; /list shows them")
        self._chat.open(self._kept.read(int(number)))

    def _file(self, path: str) -> None:
        if not path:
            self._chat.attached = []
            self._screen.note("nothing is attached")
            return
        attachment = read_attachment(path.strip("'\""), self._sees())
        self._chat.attached.append(attachment)
        words = "; ".join(one.words for one in self._chat.attached)
        self._screen.note(f"attached to the next message: {words}")
