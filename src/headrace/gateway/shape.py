"""What a dialect has to say about itself for its streams and answers to be rendered."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from headrace.streams.events import ChoiceEnd, TokenLogprob

Choice = dict[str, Any]
"""One entry of `choices`, its keys in the order of the wire."""


class Part(NamedTuple):
    """What one event adds to the text of a choice."""

    text: str
    logprobs: tuple[TokenLogprob, ...]


class Shape(Protocol):
    """Made anew for each rendering, since places in the text are counted along."""

    whole_object: str
    chunk_object: str
    has_prompt_in_choice: bool  # where the prompt's token ids go, if asked for

    def opening(self) -> list[Choice]:
        """What must be said before any text, a chunk each."""

    def idle(self, index: int) -> Choice:
        """A choice of which there is nothing to say."""

    def part(self, index: int, part: Part) -> Choice: ...

    def end(self, index: int, end: ChoiceEnd) -> Choice: ...

    def whole(self, index: int, parts: Sequence[Part], end: ChoiceEnd) -> Choice: ...
