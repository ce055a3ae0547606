"""The dialects that are spoken, and what each has to say about itself.

A dialect is a module. It reads a body: `read` checks the fields, `to_prompts` makes prompts of
those that IN_PROMPTS names, `to_request` makes the others a Request. And it renders events: its
`Shape` says what a choice looks like in a chunk and in the whole answer.
"""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from headrace.core.request import Route
from headrace.streams.events import ChoiceEnd, TokenLogprob

DIALECTS: Mapping[Route, str] = {
    "/v1/chat/completions": "headrace.protocols.openai_chat",
    "/v1/completions": "headrace.protocols.openai_completions",
}
"""By route."""

Choice = dict[str, Any]
"""One entry of `choices`, its keys in the order of the wire."""


class Part(NamedTuple):
    """What one event adds to the text of a choice."""

    text: str
    logprobs: tuple[TokenLogprob, ...]


class Dialect(Protocol):
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


def dialect_of(route: Route) -> ModuleType:
    return importlib.import_module(DIALECTS[route])
