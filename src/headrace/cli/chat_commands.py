"""The slash commands of `headrace chat`."""

import re
from collections.abc import Callable

from headrace.cli.chat import ChatLoop
from headrace.cli.chat_files import read_attachment
from headrace.cli.chat_screen import Screen
from headrace.cli.chat_store import Transcripts, table
from headrace_common.errors import ConfigError

HELP = """\
/new        start a new conversation
/again      ask the last question again
/list       list the stored conversations
/open N     continue conversation N
/file PATH  attach a text or an image; /file alone removes all attachments
/help       show this help
/exit       leave, like Ctrl-D
Enter sends; Alt-Enter, or a backslash before Enter, starts a new line.
Ctrl-C stops an answer, or clears the input line. On an empty line, press it
twice to leave.
Keys pressed during an answer appear in the next input line.
After a tool call, type its result; Ctrl-C leaves the call without a result."""
_COMMAND = re.compile(r"/[a-z]+")


class Commands:
    """Handles each line that the user enters. `sees` returns whether the model accepts images."""

    def __init__(
        self, chat: ChatLoop, screen: Screen, kept: Transcripts, sees: Callable[[], bool]
    ) -> None:
        self._chat, self._screen, self._kept, self._sees = chat, screen, kept, sees

    def do(self, line: str) -> None:
        """Run a command, or send the line as a message."""
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
                self._screen.note(f"{word} takes no argument")
            else:
                takes_none[word]()
        elif _COMMAND.fullmatch(word) and not rest:
            self._screen.note(f"{word} is not a command; /help lists the commands")
        else:
            self._chat.ask(line)

    def _list(self) -> None:
        self._screen.tell("\n".join(table(self._kept.listed())) or "no conversation is stored yet")

    def _open(self, number: str) -> None:
        if not number.isdecimal():
            raise ConfigError("/open needs the number of a conversation; /list shows them")
        self._chat.open(self._kept.read(int(number)))

    def _file(self, path: str) -> None:
        if not path:
            self._chat.detach()
            self._screen.note("removed all attachments")
            return
        attachment = read_attachment(path.strip("'\""), self._sees())
        self._chat.attached.append(attachment)
        words = "; ".join(one.words for one in self._chat.attached)
        self._screen.note(f"attached to the next message: {words}")
