"""Which stream an engine's sequence belongs to."""

import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

from headrace.core.ids import SequenceId
from headrace.engine.client import EngineClient

Owner = TypeVar("Owner")


class Sequences(Generic[Owner]):
    """Ids are never used twice, so what a dead engine said cannot reach a later submission."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._owners: dict[SequenceId, Owner] = {}

    def open(self, owner: Owner) -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        self._owners[sequence_id] = owner
        return sequence_id

    def close(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._owners.pop(sequence_id, None)

    def owner(self, sequence_id: SequenceId) -> Owner | None:
        return self._owners.get(sequence_id)

    def __len__(self) -> int:
        return len(self._owners)
