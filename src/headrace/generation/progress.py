"""The progress events of one prompt, from the scheduler's own accounting."""

from headrace.generation.choice import Choice
from headrace.streams import events


class PromptProgress:
    """The progress events of one prompt: those of its first choice, never going back."""

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self._total = self._cached = 0
        self._processed = self._told = -1
        self._began_ms = 0

    def start(self, choice: Choice, total: int, cached: int, at_ms: int) -> None:
        if choice.index == self._choice and self._processed < 0:
            self._total, self._cached, self._processed = total, cached, cached
            self._began_ms = at_ms

    def advance(self, choice: Choice, processed: int) -> None:
        if choice.index == self._choice:
            self._processed = max(self._processed, processed)

    def take(self, seq: int, at_ms: int) -> events.Progress | None:
        """The event that is due, if any."""
        if self._processed == self._told:
            return None
        self._told = self._processed
        return events.Progress(
            seq=seq,
            at_ms=at_ms,
            choice=self._choice,
            total=self._total,
            cache=self._cached,
            processed=self._processed,
            time_ms=at_ms - self._began_ms,
        )
