"""Stop strings, matched character by character in generated text; knows no tokens.

Before a choice has its minimum of tokens, its text is not fed here: a stop string must lie
wholly in what comes after.
"""

from functools import lru_cache


class StopMatcher:
    """The first stop string completed wins; of those completed together, the longest.

    What `feed` and `flush` release never holds any part of the winner, unless `include` is set:
    then it ends with it. A tail that could begin a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self.has_stops = bool(self._stops)
        self._include = include
        self._matched = [0] * len(self._stops)  # how much of each the text ends with
        self._beginnings = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it, if one did."""
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
        """Returns the text that was held back: none follows it directly."""
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


def _longer(stop: str, length: int, character: str) -> int:
    """How much of `stop` a text ends with, after `character`, if it was `length` before it."""
    while length and stop[length] != character:
        length = _borders(stop)[length]
    return length + (stop[length] == character)


@lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """For each length, the longest shorter beginning of `stop` that its first `length` end with.

    The failure function of Knuth, Morris and Pratt.
    """
    borders = [0, 0]
    for end in range(1, len(stop)):
        length = borders[end]
        while length and stop[length] != stop[end]:
            length = borders[length]
        borders.append(length + (stop[length] == stop[end]))
    return tuple(borders)
