"""Whose sequences an engine works on, and what it says of them."""

import itertools
from collections.abc import Iterable
from typing import Protocol

from headrace.core.ids import SequenceId
from headrace.core.messages import (
    Cancel,
    Finished,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    Started,
    Submit,
)
from headrace.engine.client import EngineDown, EngineUp
from headrace.generation.event_builder import Beat, InQueue
from headrace.generation.forecast import TokensAsked

Item = Started | PromptAdvance | PromptLogprobs | NewToken | Finished
"""News from an engine about one sequence."""

StreamNews = list[Item] | EngineUp | EngineDown | InQueue | Beat
"""News that a stream acts on, in order."""


class Submits(Protocol):
    """The part of an engine that its streams use."""

    def submit(self, submit: Submit) -> None: ...

    def cancel(self, cancel: Cancel) -> None: ...


class SequenceOwner(Protocol):
    """A stream, or a batch that becomes vectors."""

    def tell(self, news: StreamNews) -> None: ...

    def tell_place(self, place: InQueue) -> None: ...

    def asked(self, sequence_id: SequenceId) -> TokensAsked: ...


class Sequences:
    """The stream or batch that each of an engine's sequences belongs to.

    Ids are never used twice, so what a dead engine said cannot reach a later submission.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._owners: dict[SequenceId, SequenceOwner] = {}

    def open(self, owner: SequenceOwner) -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        self._owners[sequence_id] = owner
        return sequence_id

    def close(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._owners.pop(sequence_id, None)

    def owner(self, sequence_id: SequenceId) -> SequenceOwner | None:
        return self._owners.get(sequence_id)
