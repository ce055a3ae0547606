"""Finds stop strings in generated text, character by character, without regard to tokens.

The text of a choice's first `min_tokens` tokens is not fed. So a stop string only counts if all of
its characters come after these tokens.
"""

from functools import lru_cache


class StopMatcher:
    """Finds the first completed stop string.

    If a character completes several stop strings, the longest stop string counts.

    `feed` and `flush` return no part of the found stop string unless `include` is set. With
    `include`, the returned text ends with the stop string. Text that may begin a stop string is
    held back.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self.has_stops = bool(self._stops)
        self._include = include
        # For each stop string, the length of the longest prefix that the text ends with.
        self._matched = [0] * len(self._stops)
        self._beginnings = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the completed stop string or None."""
        if not self.has_stops:
            return text, None
        text, start = self._held + text, len(self._held)
        for end, character in enumerate(text[start:], start + 1):
            stop = self._advance(character)
            if stop is not None:
                self._held = ""
                return text[: end if self._include else end - len(stop)], stop
        safe = len(text) - max(self._matched, default=0)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Return the text that was held back.

        Call this method when no text follows directly.
        """
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    @property
    def num_held(self) -> int:
        return len(self._held)

    def _advance(self, character: str) -> str | None:
        if not any(self._matched) and character not in self._beginnings:
            return None
        completed = None
        for number, stop in enumerate(self._stops):
            length = _longer(stop, self._matched[number], character)
            self._matched[number] = length
            if length == len(stop) and length > len(completed or ""):
                completed = stop
        return completed


NO_STOPS = StopMatcher(())
"""Lets all text through. NO_STOPS has no state, so all choices without stop strings share it."""


def _longer(stop: str, length: int, character: str) -> int:
    """Return the length of the longest prefix of `stop` that the text ends with.

    `length` is this length before `character` was added to the text.
    """
    while length and stop[length] != character:
        length = _borders(stop)[length]
    return length + (stop[length] == character)


@lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """For each n, return the length of the longest proper prefix of `stop[:n]` that is also a
    suffix.

    This is the failure function of Knuth, Morris and Pratt.
    """
    borders = [0, 0]
    for end in range(1, len(stop)):
        length = borders[end]
        while length and stop[length] != stop[end]:
            length = borders[length]
        borders.append(length + (stop[length] == stop[end]))
    return tuple(borders)
