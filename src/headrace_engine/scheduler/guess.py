"""Guesses of the tokens that follow those of a sequence, and how likely each is; pure.

A guess is right if the model draws the same token. So a guesser may be wrong, but never harms.
"""

from array import array
from typing import NamedTuple, Protocol


class Guess(NamedTuple):
    """Tokens that may follow the last known one."""

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()  # of each that it and all before it are right; they fall

    @property
    def num_expected(self) -> float:
        return sum(self.chances)


class Guesser(Protocol):
    """Guesses for one sequence, asked between its steps."""

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        """At most that many tokens; `forced` ones are what its grammar lets follow."""
        ...


_WINDOW = 16384  # tokens that are searched
_LENGTHS = (8, 4, 3, 2)  # of what is searched for; the longest that is found counts
_CHANCES = (0.0, 0.0, 0.3, 0.5, 0.7, 0.85)  # at first, by the bits of the number of equal tokens
_FORCED_CHANCE = 0.9  # at first; a model may write a forced text in other tokens
_WEIGHT = 1 / 8  # of the last guess in a chance


class PastTokens:
    """Guesses that the last tokens go on as they did before.

    The tokens are kept as the characters of a string, whose search is by far the fastest there is.
    Whether its next token was right is seen from the tokens, also where it was not asked for.
    """

    def __init__(self) -> None:
        self._text = ""
        self._num_taken = 0
        self._at = -1  # where the text has the next token; -1: nowhere
        self._num_equal = 0  # tokens before that place which equal the last ones
        self._chances = list(_CHANCES)

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        self._take(token_ids)
        if self._at < 0:
            return Guess()
        found = self._text[self._at : self._at + most]
        found = (found * most)[:most]  # what ends here repeats
        chances, chance = [], 1.0
        for number in range(most):
            chance *= self._chances[_bits(self._num_equal + number)]
            chances.append(chance)
        return Guess(tuple(map(ord, found)), tuple(chances))

    def _take(self, token_ids: "array[int]") -> None:
        first, self._num_taken = self._num_taken, len(token_ids)
        if not first or len(self._text) > 2 * _WINDOW:
            self._text = "".join(map(chr, token_ids[-_WINDOW:]))
            self._search()
            return
        for token_id in token_ids[first:]:
            self._take_next(chr(token_id))

    def _take_next(self, token: str) -> None:
        is_right = self._at >= 0 and self._text[self._at] == token
        if self._at >= 0:
            place = _bits(self._num_equal)
            self._chances[place] += _WEIGHT * (is_right - self._chances[place])
        self._text += token
        if is_right:
            self._at += 1
            self._num_equal += 1
        else:
            self._search()

    def _search(self) -> None:
        self._at, text = -1, self._text
        for length in _LENGTHS:
            found = text.rfind(text[-length:], 0, len(text) - 1)
            if found >= 0:
                self._at, self._num_equal = found + length, length
                return


class ForcedTokens:
    """Guesses the only text that the sequence's grammar lets follow."""

    def __init__(self) -> None:
        self._chance = _FORCED_CHANCE
        self._told: tuple[int, int] | None = None  # a token's number, and what was forced there

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        if self._told is not None and self._told[0] < len(token_ids):
            number, token_id = self._told
            self._chance += _WEIGHT * ((token_ids[number] == token_id) - self._chance)
        self._told = (len(token_ids), forced[0]) if forced else None
        chances = tuple(self._chance**number for number in range(1, len(forced) + 1))
        return Guess(forced[:most], chances[:most])


class OwnGuesser:
    """The better one of the guesses that need nothing but the sequence."""

    def __init__(self) -> None:
        self._guessers: tuple[Guesser, ...] = (ForcedTokens(), PastTokens())

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        guesses = [guesser.guess(token_ids, forced, most) for guesser in self._guessers]
        return max(guesses, key=lambda guess: guess.num_expected)


def _bits(number: int) -> int:
    return min(number.bit_length(), len(_CHANCES) - 1)
