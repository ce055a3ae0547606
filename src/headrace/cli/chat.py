"""`headrace chat`: a conversation in the terminal, over connections that may break."""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.answer import Piece
from headrace.cli.chat_keyboard import Keyboard
from headrace.cli.chat_screen import Screen
from headrace.cli.state import state_home
from headrace.client.client import Client, Stream
from headrace.client.errors import Refused, Unreachable
from headrace.client.events import Accepted, Tokens
from headrace.client.http import to_piece
from headrace.core.errors import ConfigError, StreamFailed

Message = dict[str, Any]

_COMMANDS = ("/new", "/again", "/help", "/exit", "/quit")
_COMMAND = re.compile(r"/\w+")
HELP = """\
/new    begins a new conversation
/again  asks the last question once more
/help   shows this
/exit   leaves, as Ctrl-D does
Enter sends; Alt-Enter, or a backslash before Enter, begins another line.
Ctrl-C stops an answer, or clears what is typed.
What is typed during an answer waits for its end."""


class Conversation(msgspec.Struct):
    """The conversation that `--continue` resumes; `stream_id`: of an answer not read to its end."""

    messages: list[Message] = []
    stream_id: str = ""


class Transcript:
    """The last conversation, in a file that is replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Conversation:
        damaged = f"--continue: {self._path} is damaged; remove it."
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=Conversation)
        except FileNotFoundError:
            raise ConfigError("--continue: there is no conversation to go on with.") from None
        except OSError as error:
            reason = f"{self._path} cannot be read: {error.strerror}."
            raise ConfigError(f"--continue: {reason}") from None
        except msgspec.DecodeError:
            raise ConfigError(damaged) from None
        if not all(isinstance(m.get(k), str) for m in kept.messages for k in ("role", "content")):
            raise ConfigError(damaged)
        return kept

    def write(self, conversation: Conversation) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.touch(mode=0o600)  # for its user alone
        new.write_bytes(msgspec.json.encode(conversation))
        new.replace(self._path)


def transcript() -> Transcript:
    return Transcript(state_home() / "chat.json")


class ChatLoop:
    """`fields` go into every request."""

    def __init__(
        self,
        client: Client,
        screen: Screen,
        kept: Transcript,
        conversation: Conversation,
        fields: dict[str, Any],
    ) -> None:
        self._client, self._screen, self._kept = client, screen, kept
        self._conversation = conversation
        self._fields = fields

    def resume(self) -> None:
        """Shows where the conversation stands, and reads an answer that was left unread."""
        for message in self._conversation.messages[-2:]:
            self._screen.recall(message["role"], message["content"])
        if stream_id := self._conversation.stream_id:
            try:
                self._hear(self._client.attach(stream_id))
            except Refused:  # forgotten by now
                self._keep("")

    def ask(self, text: str) -> None:
        """One turn; Ctrl-C stops the answer, and what came of it stays.

        Refused or Unreachable if no answer came; the question is then forgotten.
        """
        self._conversation.messages.append({"role": "user", "content": text})
        try:
            self._hear(self._client.stream(self._conversation.messages, **self._fields))
        except (Refused, Unreachable):
            if not self.is_unread:
                self._conversation.messages.pop()
            raise

    def again(self) -> None:
        """Asks the last question again, in place of its answer."""
        roles = [message["role"] for message in self._conversation.messages[-2:]]
        if roles != ["user", "assistant"]:
            self._screen.note("nothing has been asked yet")
            return
        *self._conversation.messages, question, _ = self._conversation.messages
        self.ask(question["content"])

    def start_anew(self) -> None:
        """Forgets all but the system message."""
        first = self._conversation.messages[:1]
        self._conversation.messages = [m for m in first if m["role"] == "system"]
        self._screen.note("a new conversation")

    @property
    def is_unread(self) -> bool:
        """Whether an answer goes on that was not read to its end."""
        return bool(self._conversation.stream_id)

    def _hear(self, stream: Stream) -> None:
        said = _Reply()
        try:
            with contextlib.closing(stream.updates()) as updates:
                for event in updates:
                    if isinstance(event, Accepted):
                        self._keep(event.id)
                    if isinstance(event, Tokens) and event.choice == 0:
                        said.add(to_piece(event, stream.id))
                    self._screen.show(event)
        except KeyboardInterrupt:
            stream.stop()
            self._screen.note("stopped")
        except (StreamFailed, Refused) as error:
            if said.is_empty and isinstance(error, Refused):
                self._screen.end_answer()
                self._keep("")
                raise
            self._screen.note(error.message)
        self._screen.end_answer()
        self._conversation.messages.append(said.message())
        self._keep("")

    def _keep(self, stream_id: str) -> None:
        self._conversation.stream_id = stream_id
        self._kept.write(self._conversation)


class _Reply:
    """An answer as a message of the conversation; templates want no reasoning of earlier turns."""

    def __init__(self) -> None:
        self.is_empty = True
        self._text = ""
        self._calls: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> None:
        self.is_empty &= not (piece.text or piece.reasoning or piece.tool_calls)
        self._text += piece.text
        for delta in piece.tool_calls:
            if delta["index"] == len(self._calls):
                self._calls.append({name: delta[name] for name in ("id", "type", "function")})
            else:
                function = self._calls[delta["index"]]["function"]
                function["arguments"] += delta["function"]["arguments"]

    def message(self) -> Message:
        """Without a call that was cut: no server would take it back."""
        calls = [call for call in self._calls if _is_json(call["function"]["arguments"])]
        return {"role": "assistant", "content": self._text} | (
            {"tool_calls": calls} if calls else {}
        )


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def converse(chat: ChatLoop, screen: Screen, keyboard: Keyboard | None) -> None:
    """Converses until the input ends; without a keyboard that is one message."""
    if keyboard is None:
        if text := sys.stdin.read().strip():
            chat.ask(text)
        return
    while (text := keyboard.read()) is not None and text.strip() not in ("/exit", "/quit"):
        try:
            _do(text, chat, screen)
        except Refused as refused:  # this message; the next one may do
            screen.note(refused.message)
        except Unreachable as error:
            if chat.is_unread:
                raise
            screen.note(str(error))


def _do(text: str, chat: ChatLoop, screen: Screen) -> None:
    match text.strip():
        case "":
            pass
        case "/help":
            screen.tell(HELP)
        case "/new":
            chat.start_anew()
        case "/again":
            chat.again()
        case _ if text.split()[0] in _COMMANDS:
            screen.note(f"{text.split()[0]} takes nothing after it; leave it out")
        case word if _COMMAND.fullmatch(word):
            screen.note(f"{word} is not a command; /help lists them")
        case _:
            chat.ask(text)
