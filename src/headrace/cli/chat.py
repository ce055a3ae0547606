"""`headrace chat`: a conversation in the terminal, over connections that may break."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.chat_screen import Screen
from headrace.client.client import Client, Stream
from headrace.client.errors import Refused, StreamFailed
from headrace.client.events import Accepted, Tokens
from headrace.client.http import to_piece
from headrace.core.errors import ConfigError

Message = dict[str, Any]


class Conversation(msgspec.Struct):
    """What `--continue` goes on with. `stream_id` is that of an answer that was not read whole."""

    messages: list[Message] = []
    stream_id: str = ""


class Transcript:
    """The last conversation, in a file that is replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Conversation:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Conversation)
        except FileNotFoundError:
            raise ConfigError("--continue: there is no conversation to go on with.") from None
        except msgspec.DecodeError:
            raise ConfigError(f"--continue: {self._path} is damaged; remove it.") from None

    def write(self, conversation: Conversation) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(conversation))
        new.replace(self._path)


def transcript() -> Transcript:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Transcript(Path(home) / "headrace" / "chat.json")


class Chat:
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
        """One turn; Ctrl-C stops the answer, and what came of it stays."""
        self._conversation.messages.append({"role": "user", "content": text})
        try:
            self._hear(self._client.stream(self._conversation.messages, **self._fields))
        except Refused:
            self._conversation.messages.pop()
            raise

    def _hear(self, stream: Stream) -> None:
        stream.on_trouble = self._screen.trouble
        said = ""
        try:
            with contextlib.closing(stream.updates()) as updates:
                for event in updates:
                    if isinstance(event, Accepted):
                        self._keep(event.id)
                    if isinstance(event, Tokens) and event.choice == 0:
                        said += to_piece(event).text
                    self._screen.show(event)
        except KeyboardInterrupt:
            stream.stop()
            self._screen.note("stopped")
        except StreamFailed as error:
            self._screen.note(error.message)
        self._screen.end_answer()
        self._conversation.messages.append({"role": "assistant", "content": said})
        self._keep("")

    def _keep(self, stream_id: str) -> None:
        self._conversation.stream_id = stream_id
        self._kept.write(self._conversation)


def converse(chat: Chat, screen: Screen) -> None:
    """Until the input ends; what is piped in is one message."""
    if not sys.stdin.isatty():
        if text := sys.stdin.read().strip():
            chat.ask(text)
        return
    while (text := screen.read_line()) is not None:
        if text:
            try:
                chat.ask(text)
            except Refused as refused:  # this message; the next one may do
                screen.note(refused.message)
