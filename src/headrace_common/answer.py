"""Defines the requests and answers of Python callers, for both the library and the HTTP clients."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace_common.errors import HeadraceError
from headrace_common.ingestion import Ingestion

Messages = list[dict[str, Any]]
_SHOWN_CHARS = 60


class ChannelText(Protocol):
    """A piece of an answer: text of one channel, or a part of a tool call's arguments."""

    @property
    def text(self) -> str: ...
    @property
    def channel(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def name(self) -> str: ...


def asked_for(messages: Messages | str | None, prompt: Any) -> dict[str, Any]:
    """Return the only field of a request body: `messages` or `prompt`.

    A string in `messages` becomes one user message. Raises TypeError unless the caller gives
    exactly one of the two arguments.
    """
    if (messages is None) == (prompt is None):
        raise TypeError("pass either messages, or prompt=... to continue raw text")
    if messages is None:
        return {"prompt": prompt}
    is_text = isinstance(messages, str)
    return {"messages": [{"role": "user", "content": messages}] if is_text else messages}


def are_several(inputs: Any) -> bool:
    """Whether `inputs` is a list of conversations or prompts; an empty list is one input."""
    is_list = isinstance(inputs, list | tuple) and bool(inputs)
    return is_list and isinstance(inputs[0], str | list | tuple)


@contextlib.contextmanager
def naming_input(number: int) -> Iterator[None]:
    """Add to an error which input of a list was wrong. The note appears in the traceback."""
    try:
        yield
    except HeadraceError as error:
        error.add_note(f"This is about input {number} of the list, counted from 0.")
        raise


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


class Piece(msgspec.Struct, frozen=True):
    """The next piece of one choice.

    The text may lag behind the token ids. Only the last piece has a finish reason.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []  # in OpenAI's delta format

    @classmethod
    def of(
        cls,
        place: tuple[str, int],
        said: Sequence[ChannelText],
        ids: Iterable[int],
        reason: str | None,
    ) -> "Piece":
        """Build a piece of a choice from texts and token ids.

        `place` has the stream's id and the choice's index. `reason` is None except in the last
        piece.
        """
        text, reasoning = (
            "".join(piece.text for piece in said if piece.channel == channel)
            for channel in ("content", "reasoning")
        )
        return cls(place[1], text, list(ids), reason, reasoning, call_deltas(place, said))


class Ranked(msgspec.Struct, frozen=True):
    """A document's index in the request, and the document's relevance."""

    index: int
    score: float = msgspec.field(name="relevance_score")


class Choice(msgspec.Struct, frozen=True):
    """One answer to a prompt. `logprobs` has the format of the request's route."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []  # in OpenAI's format

    def __repr__(self) -> str:
        return f"Choice({self.index}, {_said(self)}, {len(self.token_ids)} tokens)"


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A complete answer. Properties such as `text` return values of the first choice."""

    id: str
    choices: list[Choice]
    usage: dict[str, Any]
    timings: dict[str, Any]
    # How the prompt was processed, if the request set `return_ingestion`.
    ingestion: Ingestion | None = None

    @classmethod
    def of(cls, body: dict[str, Any]) -> "Answer":
        """Parse the body of a chat completion or a text completion."""
        choices = [_choice(choice) for choice in body["choices"]]
        ingestion = body.get("headrace", {}).get("ingestion")
        if ingestion is not None:
            ingestion = msgspec.convert(ingestion, Ingestion)
        return cls(body["id"], choices, body["usage"], body["timings"], ingestion)

    def __repr__(self) -> str:
        more = f", {len(self.choices)} choices" if len(self.choices) != 1 else ""
        numbers = f"{self.usage['prompt_tokens']} + {self.usage['completion_tokens']} tokens"
        return f"Answer({_said(self.choices[0])}, {numbers}{more})"

    def _repr_markdown_(self) -> str:
        """Return the answer as Markdown, for notebooks."""
        parts = []
        for choice in self.choices:
            calls = (call["function"] for call in choice.tool_calls)
            parts.append(choice.text)
            parts += [f"`{call['name']}({call['arguments']})`" for call in calls]
        return "\n\n---\n\n".join(filter(None, parts))

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.choices[0].tool_calls

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> dict[str, Any] | None:
        return self.choices[0].logprobs


def _said(choice: Choice) -> str:
    """Return the start of a choice's text, the names of its tool calls and why it ended."""
    text = choice.text if len(choice.text) <= _SHOWN_CHARS else f"{choice.text[:_SHOWN_CHARS]}…"
    calls = ", ".join(call["function"]["name"] for call in choice.tool_calls)
    return ", ".join(filter(None, (repr(text), calls, choice.finish_reason)))


def _choice(choice: dict[str, Any]) -> Choice:
    message = choice.get("message", {})
    text = message["content"] if message else choice["text"]
    return Choice(
        index=choice["index"],
        text=text or "",
        token_ids=choice.get("token_ids", []),
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=choice["logprobs"],
        reasoning=message.get("reasoning", ""),
        tool_calls=message.get("tool_calls", []),
    )


def call_id(stream_id: str, choice: int, call: int, prefix: str = "call_") -> str:
    """Return the id of a tool call. Every reader of the stream computes the same id."""
    digest = hashlib.sha256(f"{stream_id}:{choice}:{call}".encode()).hexdigest()
    return f"{prefix}{digest[:24]}"


class JoinedPieces(NamedTuple):
    """The joined text of consecutive pieces with the same channel and tool call."""

    channel: str
    call: int
    name: str
    text: str


def runs(pieces: Iterable[ChannelText]) -> Iterator[JoinedPieces]:
    for (channel, call), group in itertools.groupby(pieces, lambda it: (it.channel, it.call)):
        names, texts = zip(*((piece.name, piece.text) for piece in group), strict=True)
        yield JoinedPieces(channel, call, "".join(names), "".join(texts))


def call_deltas(place: tuple[str, int], pieces: Iterable[ChannelText]) -> list[dict[str, Any]]:
    """Return the tool calls among the pieces of a choice, in OpenAI's delta format."""
    found = runs(piece for piece in pieces if piece.channel == "tool")
    return [_call_delta(place, run.call, run.name, run.text) for run in found]


def _call_delta(place: tuple[str, int], call: int, name: str, arguments: str) -> dict[str, Any]:
    """Return a piece of a tool call in OpenAI's delta format.

    Only the first piece of a call contains the id and the name.
    """
    if not name:
        return {"index": call, "function": {"arguments": arguments}}
    return {
        "index": call,
        "id": call_id(*place, call),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
