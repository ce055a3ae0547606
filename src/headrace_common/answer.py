"""Requests and answers of Python callers, in process and over HTTP alike; knows neither."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

Messages = list[dict[str, Any]]


class Said(Protocol):
    """More text of one channel of an answer, as its log has it; of a tool call, its arguments."""

    @property
    def text(self) -> str: ...
    @property
    def channel(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def name(self) -> str: ...


def asked_for(messages: Messages | str | None, prompt: Any) -> dict[str, Any]:
    """The field that says what to answer: messages (a string is one), or raw text."""
    if (messages is None) == (prompt is None):
        raise TypeError("give either messages, or prompt=... to go on with raw text")
    if messages is None:
        return {"prompt": prompt}
    is_text = isinstance(messages, str)
    return {"messages": [{"role": "user", "content": messages}] if is_text else messages}


class Piece(msgspec.Struct, frozen=True):
    """The next piece of one choice. Text may lag behind its ids; the last piece has the reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []  # as OpenAI's deltas have them

    @classmethod
    def of(
        cls, place: tuple[str, int], said: Sequence[Said], ids: Iterable[int], reason: str | None
    ) -> "Piece":
        """The piece of a stream's choice; `reason` is set where the choice ends."""
        text, reasoning = (
            "".join(piece.text for piece in said if piece.channel == channel)
            for channel in ("content", "reasoning")
        )
        return cls(place[1], text, list(ids), reason, reasoning, call_deltas(place, said))


class Ranked(msgspec.Struct, frozen=True):
    """A document's place among those given, and how relevant it is."""

    index: int
    score: float = msgspec.field(name="relevance_score")


class Choice(msgspec.Struct, frozen=True):
    """One of the answers to a prompt; `logprobs` in the form of its route."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []  # in OpenAI's form


class Answer(msgspec.Struct, frozen=True):
    """A whole answer; its own properties are those of its first choice."""

    id: str
    choices: list[Choice]
    usage: dict[str, Any]
    timings: dict[str, Any]

    @classmethod
    def of(cls, body: dict[str, Any]) -> "Answer":
        """Reads the answer from the body of either route."""
        choices = [_choice(choice) for choice in body["choices"]]
        return cls(body["id"], choices, body["usage"], body["timings"])

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
    """The same for every reader of the log."""
    digest = hashlib.sha256(f"{stream_id}:{choice}:{call}".encode()).hexdigest()
    return f"{prefix}{digest[:24]}"


class Run(NamedTuple):
    """Pieces that follow each other in one channel, of one call, as one."""

    channel: str
    call: int
    name: str
    text: str


def runs(pieces: Iterable[Said]) -> Iterator[Run]:
    for (channel, call), group in itertools.groupby(pieces, lambda it: (it.channel, it.call)):
        names, texts = zip(*((piece.name, piece.text) for piece in group), strict=True)
        yield Run(channel, call, "".join(names), "".join(texts))


def call_deltas(place: tuple[str, int], pieces: Iterable[Said]) -> list[dict[str, Any]]:
    """The tool calls among the pieces of a stream's choice, in OpenAI's form."""
    found = runs(piece for piece in pieces if piece.channel == "tool")
    return [_call_delta(place, run.call, run.name, run.text) for run in found]


def _call_delta(place: tuple[str, int], call: int, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form, with its id and name where it begins."""
    if not name:
        return {"index": call, "function": {"arguments": arguments}}
    return {
        "index": call,
        "id": call_id(*place, call),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
