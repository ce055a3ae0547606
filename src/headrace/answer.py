"""What Python callers ask and get, in process and over HTTP alike; it knows neither."""

from typing import Any

import msgspec

Messages = list[dict[str, Any]]


def asked_for(messages: Messages | str | None, prompt: Any) -> dict[str, Any]:
    """The field that says what to answer: messages (a string is one), or raw text."""
    if (messages is None) == (prompt is None):
        raise TypeError("give either messages, or prompt=... to go on with raw text")
    if messages is None:
        return {"prompt": prompt}
    is_text = isinstance(messages, str)
    return {"messages": [{"role": "user", "content": messages}] if is_text else messages}


class Piece(msgspec.Struct, frozen=True):
    """What came next of one choice. Text may lag behind its ids; the last piece has the reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


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
        """From the body that either route answers with."""
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
