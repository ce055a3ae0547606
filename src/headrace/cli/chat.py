"""`headrace chat`: a conversation in the terminal. It continues when a connection breaks."""

import contextlib
from collections.abc import Callable
from typing import Any

from headrace.cli.chat_files import Attachment, message_of
from headrace.cli.chat_keyboard import Keyboard
from headrace.cli.chat_screen import Screen
from headrace.cli.chat_store import Conversation, Message, Transcripts, words_of
from headrace.client.client import Client, Stream
from headrace.client.errors import Refused, Unreachable
from headrace.client.events import Accepted, Tokens
from headrace.client.http import to_piece
from headrace_common.answer import Piece, is_json
from headrace_common.errors import StreamFailed

_GONE = (404, 410)  # statuses for a stream that the server no longer has


class ChatLoop:
    """A chat. `fields` are the request's fields; `conversation` may change after each message."""

    def __init__(
        self,
        client: Client,
        screen: Screen,
        kept: Transcripts,
        conversation: Conversation,
        fields: dict[str, Any],
    ) -> None:
        self._client, self._screen, self._kept = client, screen, kept
        self.conversation = conversation
        # The attachments for the next message.
        self.attached: list[Attachment] = []
        self._fields = fields
        self._is_unstored = False

    def detach(self) -> None:
        """Remove all attachments from the next message."""
        self.attached = []

    def show_end(self) -> None:
        """Show the end of the conversation. Then continue reading an unfinished answer."""
        for message in self.conversation.messages[-2:]:
            if words := words_of(message):
                self._screen.recall(message["role"], words)
        self.read_on()

    def read_on(self) -> None:
        """Read an unfinished answer from its start. Raises Refused if the server refuses."""
        if stream_id := self.conversation.stream_id:
            try:
                self._hear(self._client.attach(stream_id))
            except Refused as error:
                if error.status not in _GONE:
                    raise

    def ask(self, text: str) -> None:
        """Send a message and read the answer. Ctrl-C stops the answer and keeps the text so far.

        Raises Refused or Unreachable if no answer started; the message is then removed again.
        """
        self.read_on()
        self._say([message_of(text, self.attached)])
        self.attached = []

    def answer_calls(self, results: list[str]) -> None:
        """Send the results of all open tool calls and read the model's answer."""
        calls = self.open_calls
        self._say(
            [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
        )

    @property
    def open_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the last message, which still need results."""
        last = self.conversation.messages[-1:]
        return last[0].get("tool_calls", []) if last else []

    def again(self) -> None:
        """Ask the last question again. Its new answer replaces all messages after the question."""
        messages = self.conversation.messages
        asked = [k for k, message in enumerate(messages) if message["role"] == "user"]
        if not asked:
            self._screen.note("there is no question yet")
            return
        question = messages[asked[-1]]
        self.conversation.become(messages[: asked[-1]])
        try:
            self._say([question])
        except (Refused, Unreachable, KeyboardInterrupt):
            if not self.is_unread:
                self.conversation.become(messages)
            raise

    def start_anew(self) -> None:
        """Start a new conversation with the same system message."""
        first = self.conversation.messages[:1]
        self.conversation = Conversation([m for m in first if m["role"] == "system"])
        self._screen.note("new conversation")

    def open(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.show_end()

    @property
    def is_unread(self) -> bool:
        """Return whether an answer was not read to its end."""
        return bool(self.conversation.stream_id)

    def _say(self, messages: list[Message]) -> None:
        said = self.conversation.messages
        said += messages
        num_said = len(said)
        try:
            self._hear(self._client.stream(said, **self._fields))
        except (Refused, Unreachable, KeyboardInterrupt):
            # No answer started, so the messages are removed again.
            if not self.is_unread and len(said) == num_said:
                del said[-len(messages) :]
            raise

    def _hear(self, stream: Stream) -> None:
        said, is_cut = _Reply(), False
        try:
            with contextlib.closing(stream.updates()) as updates:
                for event in updates:
                    if isinstance(event, Accepted):
                        self._keep(event.id)
                    if isinstance(event, Tokens) and event.choice == 0:
                        said.add(piece := to_piece(event, stream.id))
                        is_cut = piece.finish_reason == "length"
                    self._screen.show(event)
        except KeyboardInterrupt:
            # The server has not accepted the request, so there is no stream to stop.
            if said.is_empty and not self.is_unread:
                raise
            stream.stop()
            self._screen.note("stopped")
        except (StreamFailed, Refused) as error:
            is_gone = isinstance(error, Refused) and error.status in _GONE
            if isinstance(error, Refused) and (said.is_empty or not is_gone):
                self._screen.end_answer()
                if is_gone:
                    self._keep("")
                # If the stream still exists, its id is kept, so that a later attempt can read the
                # stream.
                raise
            self._screen.note(error.message)
        if is_cut:
            self._screen.note("cut off at the limit of tokens")
        self._screen.end_answer()
        self.conversation.messages.append(said.message())
        self._keep("")

    def _keep(self, stream_id: str) -> None:
        self.conversation.read(stream_id)
        try:
            self._kept.write(self.conversation)
        # The home folder may be read-only, or the disk full.
        except OSError as error:
            if not self._is_unstored:
                self._screen.note(f"this conversation is not stored: {error.strerror}")
            self._is_unstored = True


class _Reply:
    """Collects the parts of an answer in one message, except reasoning.

    Chat templates expect messages without reasoning.
    """

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
        """Return the message without truncated calls, because servers would refuse such calls."""
        calls = [call for call in self._calls if is_json(call["function"]["arguments"])]
        return {"role": "assistant", "content": self._text} | (
            {"tool_calls": calls} if calls else {}
        )


Act = Callable[[str], None]


def converse(chat: ChatLoop, screen: Screen, keyboard: Keyboard, act: Act) -> None:
    """Hold a conversation until the input ends.

    `act` handles each line. If a message cannot be sent, its text is put back into the input.
    """
    draft = ""
    while True:
        text, draft = _read(screen, keyboard, draft), ""
        if text is None or text.strip() in ("/exit", "/quit"):
            return
        before = len(chat.conversation.messages)
        try:
            act(text)
            _answer_calls(chat, screen, keyboard)
        # The next message can still succeed, so the conversation continues.
        except (Refused, Unreachable, KeyboardInterrupt) as error:
            is_sent = len(chat.conversation.messages) != before
            screen.note(str(error) or ("stopped" if is_sent else "not sent"))
            draft = "" if is_sent else text
            if chat.is_unread:
                screen.note(
                    "the answer continues on the server; press Enter on an empty line to read it"
                )


def _read(screen: Screen, keyboard: Keyboard, draft: str) -> str | None:
    """Read the next message. On an empty line, only a second Ctrl-C raises KeyboardInterrupt.

    The answer may have ended just before the user pressed Ctrl-C to stop it.
    """
    try:
        return keyboard.read(default=draft)
    except KeyboardInterrupt:
        screen.note("to leave, press Ctrl-C again, or Ctrl-D")
        return keyboard.read()


def _answer_calls(chat: ChatLoop, screen: Screen, keyboard: Keyboard) -> None:
    """Ask the user for tool results until the model makes no more calls.

    Ctrl-C or Ctrl-D leaves the calls without results.
    """
    while calls := chat.open_calls:
        results = []
        for call in calls:
            name = call["function"]["name"]
            try:
                result = keyboard.read(f"result of {name}> ")
            except KeyboardInterrupt:
                result = None
            if result is None:
                screen.note("left the tool calls without results")
                return
            results.append(result)
        chat.answer_calls(results)
