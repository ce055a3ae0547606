"""A prompt's progress in words, which stand where a model's reasoning would, and never come back.

For clients that count nothing but output as life: a line is a rendering of one progress event.
"""

import re

from headrace.streams.events import Progress
from headrace.streams.record import Record

_MARK = "\N{INVISIBLE SEPARATOR}"  # nobody sees it, and no model writes it
_LINE = re.compile(rf"{_MARK}Reading the prompt: \d+ %(?:, \d+ (?:s|min) left)?\n")
_FIRST_MS = 3_000  # shorter prompts are not worth a word
_EVERY_MS = 10_000
_IN_MINUTES_S = 120


class ProgressWords:
    """The lines of one stream: none in the first seconds of its prompt, then one every ten.

    None at all unless they were asked for, beside a grammar, or where an answer goes on; of several
    prompts or choices the first one's.
    """

    def __init__(self, record: Record) -> None:
        request = record.request
        is_free = not request.sampling.grammar and record.mode == "fresh"
        self._are_told = request.response_options.progress_in_words and is_free
        self._due_ms = 0

    def take(self, event: Progress) -> str:
        """The line that this event adds, or nothing."""
        is_early = event.time_ms < _FIRST_MS or event.at_ms < self._due_ms
        if not self._are_told or event.choice or is_early or event.processed == event.total:
            return ""
        self._due_ms = event.at_ms + _EVERY_MS
        share = 100 * event.processed // event.total
        return f"{_MARK}Reading the prompt: {share} %{_left(event)}\n"


def _left(event: Progress) -> str:
    num_read = event.processed - event.cache
    if not num_read:
        return ""
    seconds = (event.total - event.processed) * event.time_ms / num_read / 1000
    return (
        f", {seconds / 60:.0f} min left" if seconds > _IN_MINUTES_S else f", {seconds:.0f} s left"
    )


def without_progress(reasoning: str) -> str:
    """Reasoning as the model wrote it, of an answer that comes back as history."""
    return _LINE.sub("", reasoning) if _MARK in reasoning else reasoning
