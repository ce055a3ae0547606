"""The reference: what the server must answer, computed from the request alone."""

from typing import Any, NamedTuple

from detangle import choice, randint

from headrace_common.sampling import Sampling
from stress.simulator.fake_runner import token_at

MODEL = "headrace-mini"
END_TOKEN_IDS = (2, 0)


class Answer(NamedTuple):
    """A whole answer: its text, why it ends, and how many tokens were generated.

    `stop` is the stop string that ended the answer, or empty.
    """

    text: str
    finish_reason: str
    num_tokens: int
    stop: str = ""


class Request(NamedTuple):
    """A chat request. Its seed and length determine the answer, whatever happens to the server."""

    seed: int
    max_tokens: int
    content: str
    # The idempotency key.
    key: str
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    # Whether the answer has log probabilities.
    has_logprobs: bool = False
    # Whether the answer repeats the prompt first.
    has_echo: bool = False
    has_tools: bool = False

    def longer(self) -> "Request":
        """Return a request whose answer takes some seconds."""
        return self._replace(max_tokens=400, content="x" * 10)

    def body(self, is_stream: bool, **fields: Any) -> dict[str, Any]:
        """Return the body for /v1/chat/completions."""
        several = {"n": self.num_choices} if self.num_choices > 1 else {}
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.content}],
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "stream": is_stream,
            **several,
            **({"stop": list(self.stops)} if self.stops else {}),
            **fields,
        }

    def answer(self, tokenizer: Any, choice: int = 0) -> Answer:
        """Return the only right answer. The simulated engine draws tokens with `token_at`."""
        sampling = Sampling(seed=self.seed, max_tokens=self.max_tokens)
        tokens: list[int] = []
        while len(tokens) < self.max_tokens:
            token = token_at(sampling, choice, len(tokens))
            if token in END_TOKEN_IDS:
                return Answer(tokenizer.decode(tokens, True), "stop", len(tokens) + 1)
            tokens.append(token)
            if not self.stops:
                continue
            text = tokenizer.decode(tokens, True)
            if stop := next((it for it in self.stops if it in text), ""):
                return Answer(text[: text.index(stop)], "stop", len(tokens), stop)
        return Answer(tokenizer.decode(tokens, True), "length", len(tokens))


def draw(number: int) -> Request:
    """Choose a request. `number` makes its key unique."""
    return Request(
        seed=randint(0, 1 << 20),
        max_tokens=choice((1, 3, 20, 60, 150)),
        content="x" * choice((1, 10, 100, 300)),
        key=f"key-{number}",
    )
