"""Writes a prompt's progress as text into the reasoning, and removes such text from histories.

Some clients count only output as a sign of life. Each line of text renders one progress event.
"""

import re

from headrace.streams.events import Progress
from headrace.streams.record import Record

# Clients do not display this character, and no model writes it.
_MARK = "\N{INVISIBLE SEPARATOR}"
# Histories may contain lines of earlier versions, which began with "Reading".
_LINE = re.compile(rf"{_MARK}(?:Processing|Reading) the prompt: \d+ %(?:, \d+ (?:s|min) left)?\n")
# A prompt that is processed in less time gets no progress lines.
_FIRST_MS = 3_000
_EVERY_MS = 10_000
_IN_MINUTES_S = 120


class ProgressWords:
    """Writes the progress lines of one stream: none in the first 3 s, then at most one every 10 s.

    Writes no lines if the client did not ask for progress text, if a grammar restricts the answer,
    or if the stream continues an earlier answer. Only the first choice gets lines.
    """

    def __init__(self, record: Record) -> None:
        request = record.request
        is_free = not request.sampling.grammar and record.mode == "fresh"
        self._is_on = request.response_options.progress_in_words and is_free
        self._due_ms = 0

    def take(self, event: Progress) -> str:
        """Return the line that this event adds, or an empty string."""
        is_early = event.time_ms < _FIRST_MS or event.at_ms < self._due_ms
        if not self._is_on or event.choice or is_early or event.processed == event.total:
            return ""
        self._due_ms = event.at_ms + _EVERY_MS
        percent = 100 * event.processed // event.total
        return f"{_MARK}Processing the prompt: {percent} %{_left(event)}\n"


def _left(event: Progress) -> str:
    num_read = event.processed - event.cache
    if not num_read:
        return ""
    seconds = (event.total - event.processed) * event.time_ms / num_read / 1000
    if seconds > _IN_MINUTES_S:
        return f", {seconds / 60:.0f} min left"
    return f", {seconds:.0f} s left"


def without_progress(reasoning: str) -> str:
    """Remove the progress lines from the reasoning of an earlier answer."""
    return _LINE.sub("", reasoning) if _MARK in reasoning else reasoning
