"""Finds the stream that is to blame for the deaths of engines."""

from collections.abc import Iterable

from headrace.engines.client import EngineDown
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId

_MAX_OUTSIDE_DEATHS = 3


class CrashBlame:
    """One stream's part in the deaths of engines.

    A stream that was in the step an engine died in is suspect, and runs alone until its next
    token. A suspect alone in the next fatal step is guilty at once if the engine died by its own
    doing; kills from outside prove nothing until the third in a row.
    """

    def __init__(self) -> None:
        self.is_suspect = False
        self._num_lone_deaths = 0

    def clear(self) -> None:
        """Clears the suspicion: the stream got a token."""
        self.is_suspect = False
        self._num_lone_deaths = 0

    def judge(self, down: EngineDown, sequence_ids: Iterable[SequenceId]) -> RequestError | None:
        """An engine died that had these; the error that ends the stream, if it is to blame."""
        suspects = set(down.suspects)
        if suspects.isdisjoint(sequence_ids):
            return None
        was_suspect, self.is_suspect = self.is_suspect, True
        if not (was_suspect and suspects.issubset(sequence_ids)):
            return None
        self._num_lone_deaths += 1
        if down.from_outside and self._num_lone_deaths < _MAX_OUTSIDE_DEATHS:
            return None
        return RequestError(
            "poison_request",
            "The engine died on this request, and again when it ran alone; change the request.",
        )
