"""Finds the stream that causes engine processes to die."""

from collections.abc import Iterable

from headrace.engines.client import EngineDown
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId

_MAX_OUTSIDE_DEATHS = 3


class CrashBlame:
    """Tracks whether one stream causes engine processes to die.

    If an engine dies during a step, each stream in the step becomes a suspect. A suspect runs
    alone until its next token.

    A suspect that is alone in the next fatal step is blamed immediately if the engine died by
    itself. If something outside killed the engine, the suspect is blamed only at the third lone
    death in a row, because a single kill may be a coincidence.
    """

    is_suspect = False
    _num_lone_deaths = 0

    def clear(self) -> None:
        """Clear the suspicion after the stream got a token."""
        self.is_suspect = False
        self._num_lone_deaths = 0

    def judge(self, down: EngineDown, sequence_ids: Iterable[SequenceId]) -> RequestError | None:
        """Record an engine's death if the stream is a suspect.

        Return the error that ends the stream if it is blamed, else None.

        `sequence_ids` are the stream's sequences in the dead engine.
        """
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
            "The engine died while it processed this request, and again when this request ran "
            "alone; change the request.",
        )
