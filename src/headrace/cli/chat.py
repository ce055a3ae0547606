"""`headrace chat`: a conversation in the terminal, over connections that may break."""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.cli.chat_files import Attachment, message_of
from headrace.cli.chat_keyboard import Keyboard
from headrace.cli.chat_screen import Screen
from headrace.cli.chat_store import Conversation, Message, Transcripts, words_of
from headrace.cli.stdio import read_stdin
from headrace.client.client import Client, Stream
from headrace.client.errors import Refused, Unreachable
from headrace.client.events import Accepted, Tokens
from headrace.client.http import to_piece
from headrace_common.answer import Piece
from headrace_common.errors import StreamFailed

_GONE = (404, 410)  # statuses of a stream that the server has forgotten


class ChatLoop:
    """`fields` go into every request; `conversation` may be another one after each turn."""

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
        self.attached: list[Attachment] = []  # to the next message
        self._fields = fields

    def show_end(self) -> None:
        """Shows where the conversation stands, and reads an answer that was left unread."""
        for message in self.conversation.messages[-2:]:
            if words := words_of(message):
                self._screen.recall(message["role"], words)
        self.read_on()

    def read_on(self) -> None:
        """Reads an answer that was not read to its end, from its begin; Refused if it may not."""
        if stream_id := self.conversation.stream_id:
            try:
                self._hear(self._client.attach(stream_id))
            except Refused as error:
                if error.status not in _GONE:
                    raise

    def ask(self, text: str) -> None:
        """One turn; Ctrl-C stops the answer, and what came of it stays.

        Refused or Unreachable if no answer came; the question is then forgotten.
        """
        self.read_on()
        self._say([message_of(text, self.attached)])
        self.attached = []

    def answer_calls(self, results: list[str]) -> None:
        """Gives the results of all open calls, and hears what the model makes of them."""
        calls = self.open_calls
        self._say(
            [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
        )

    @property
    def open_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the last message, whose results the model waits for."""
        last = self.conversation.messages[-1:]
        return last[0].get("tool_calls", []) if last else []

    def again(self) -> None:
        """Asks the last question again, in place of all that came of it."""
        messages = self.conversation.messages
        asked = [k for k, message in enumerate(messages) if message["role"] == "user"]
        if not asked:
            self._screen.note("nothing has been asked yet")
            return
        question = messages[asked[-1]]
        before, self.conversation.messages = messages, messages[: asked[-1]]
        try:
            self._say([question])
        except (Refused, Unreachable, KeyboardInterrupt):
            if not self.is_unread:
                self.conversation.messages = before
            raise

    def start_anew(self) -> None:
        """A new conversation, with the system message of this one."""
        first = self.conversation.messages[:1]
        self.conversation = Conversation([m for m in first if m["role"] == "system"])
        self._screen.note("a new conversation")

    def open(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.show_end()

    @property
    def is_unread(self) -> bool:
        """Whether an answer goes on that was not read to its end."""
        return bool(self.conversation.stream_id)

    def _say(self, messages: list[Message]) -> None:
        said = self.conversation.messages
        said += messages
        num_said = len(said)
        try:
            self._hear(self._client.stream(said, **self._fields))
        except (Refused, Unreachable, KeyboardInterrupt):
            if not self.is_unread and len(said) == num_said:  # no answer came
                del said[-len(messages) :]
            raise

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
            if said.is_empty and not self.is_unread:  # no server has taken it yet
                raise
            stream.stop()
            self._screen.note("stopped")
        except (StreamFailed, Refused) as error:
            is_gone = isinstance(error, Refused) and error.status in _GONE
            if isinstance(error, Refused) and (said.is_empty or not is_gone):
                self._screen.end_answer()
                if is_gone:
                    self._keep("")
                raise  # unless it is gone, the right key or another try reads it
            self._screen.note(error.message)
        self._screen.end_answer()
        self.conversation.messages.append(said.message())
        self._keep("")

    def _keep(self, stream_id: str) -> None:
        self.conversation.stream_id = stream_id
        self._kept.write(self.conversation)


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


Act = Callable[[str], None]


def converse(chat: ChatLoop, screen: Screen, keyboard: Keyboard | None, act: Act) -> None:
    """Converses until the input ends; without a keyboard that is one message.

    `act` does what a line asks for. A message that could not be sent is there again to be sent.
    """
    if keyboard is None:
        if piped := read_stdin().strip():
            chat.ask(piped)
        return
    draft = ""
    while True:
        text, draft = keyboard.read(default=draft), ""
        if text is None or text.strip() in ("/exit", "/quit"):
            return
        before = len(chat.conversation.messages)
        try:
            act(text)
            _answer_calls(chat, screen, keyboard)
        except (Refused, Unreachable, KeyboardInterrupt) as error:  # the next message may do
            is_sent = len(chat.conversation.messages) != before
            screen.note(str(error) or ("stopped" if is_sent else "not sent"))
            draft = "" if is_sent else text
            if chat.is_unread:
                screen.note("the answer goes on; Enter on an empty line reads it")


def _answer_calls(chat: ChatLoop, screen: Screen, keyboard: Keyboard) -> None:
    """Asks for the results of tool calls until the model makes none; Ctrl-C or Ctrl-D leaves it."""
    while calls := chat.open_calls:
        results = []
        for call in calls:
            name = call["function"]["name"]
            try:
                result = keyboard.read(f"result of {name}> ")
            except KeyboardInterrupt:
                result = None
            if result is None:
                screen.note("the calls stay without results")
                return
            results.append(result)
        chat.answer_calls(results)
