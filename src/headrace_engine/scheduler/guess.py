"""Guesses the next tokens of a sequence, with the probability of each guess.

A guess counts only if the model draws the same token, so a wrong guess changes no text.
"""

from array import array
from typing import NamedTuple, Protocol

from headrace_common.plan import DRAFTED


class Guess(NamedTuple):
    """Holds tokens that may follow the last known token."""

    token_ids: tuple[int, ...] = ()
    # For each token, the probability that the token and all earlier guessed tokens are correct.
    chances: tuple[float, ...] = ()

    @property
    def num_expected(self) -> float:
        return sum(self.chances)

    @property
    def is_drafted(self) -> bool:
        """Return whether the draft model will choose the tokens during the step."""
        return self.token_ids[:1] == (DRAFTED,)


class Guesser(Protocol):
    """Guesses the next tokens of one sequence."""

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        """Return a guess of at most `most` tokens.

        `forced` are the tokens that the sequence's grammar requires next.
        """


# Once the searched text has more than twice this number of tokens, the text is cut to this number.
_WINDOW = 16384
# How many of the last tokens are searched for in the earlier text, in this order. The first match
# is used.
_LENGTHS = (8, 4, 3, 2)
# The initial probabilities that a guess is correct. The index is the bit length of the number of
# tokens that match before the guess.
_CHANCES = (0.0, 0.0, 0.3, 0.5, 0.7, 0.85)
# The initial probability that a forced token is correct. The value is below 1 because a model may
# split a forced text into other tokens.
_FORCED_CHANCE = 0.9
# The weight of the last guess when a probability is updated.
_WEIGHT = 1 / 8


class PastTokens:
    """Guesses that the text repeats itself.

    If the last tokens also occur earlier in the text, the tokens after the earlier occurrence are
    the guess. The tokens are stored as the characters of a string, because string search is
    fastest. Each new token is compared with its guess, even if no step used the guess.
    """

    def __init__(self) -> None:
        self._text = ""
        self._num_taken = 0
        # The index of the guessed next token in the text; -1 if there is no guess.
        self._at = -1
        # How many tokens before index `_at` match the last tokens of the text.
        self._num_equal = 0
        self._chances = list(_CHANCES)

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        self._take(token_ids)
        if self._at < 0:
            return Guess()
        found = self._text[self._at : self._at + most]
        # Repeat a found text that is shorter than `most`.
        found = (found * most)[:most]
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
            index = _bits(self._num_equal)
            self._chances[index] += _WEIGHT * (is_right - self._chances[index])
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
    """Guesses the forced tokens: the only tokens that the sequence's grammar allows next."""

    def __init__(self) -> None:
        self._chance = _FORCED_CHANCE
        # The index and the id of the first token in the last guess.
        self._last_guess: tuple[int, int] | None = None

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        if self._last_guess is not None and self._last_guess[0] < len(token_ids):
            number, token_id = self._last_guess
            self._chance += _WEIGHT * ((token_ids[number] == token_id) - self._chance)
        self._last_guess = (len(token_ids), forced[0]) if forced else None
        chances = tuple(self._chance**number for number in range(1, len(forced) + 1))
        return Guess(forced[:most], chances[:most])


class OwnGuesser:
    """Returns the guess with more expected tokens, from either ForcedTokens or PastTokens."""

    def __init__(self) -> None:
        self._guessers: tuple[Guesser, ...] = (ForcedTokens(), PastTokens())

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        guesses = [guesser.guess(token_ids, forced, most) for guesser in self._guessers]
        return max(guesses, key=lambda guess: guess.num_expected)


# The initial probability that the next token of the draft model is right.
_DRAFT_CHANCE = 0.6
# The weight of one drafted token when a probability is updated.
_DRAFT_WEIGHT = 1 / 16
# How far a probability returns to _DRAFT_CHANCE in each step, as a fraction.
_HOPE = 1 / 1024


class DraftChance:
    """Estimates the probability that the draft model's next token is right, for one sequence.

    While the draft model is not used, the estimate slowly returns to the initial value, so the
    model is tried again now and then. `usual` is the estimate over all sequences, with which a new
    sequence starts.
    """

    def __init__(self, usual: "DraftChance | None" = None) -> None:
        self._usual = usual
        self.value = _DRAFT_CHANCE
        if usual is not None:
            usual.hope(_DRAFT_WEIGHT)
            self.value = usual.value

    def hope(self, fraction: float) -> None:
        """Move the estimate towards the initial value."""
        self.value += fraction * (_DRAFT_CHANCE - self.value)

    def guess(self, most: int) -> Guess:
        """Return `most` tokens that the draft model would choose."""
        self.hope(_HOPE)
        return Guess((DRAFTED,) * most, tuple(self.value**n for n in range(1, most + 1)))

    def learn(self, num_tokens: int, num_right: int) -> None:
        """Learn from a guess of the draft model; nothing is known after the first wrong token."""
        for number in range(min(num_right + 1, num_tokens)):
            self.value += _DRAFT_WEIGHT * ((number < num_right) - self.value)
        if self._usual is not None:
            self._usual.learn(num_tokens, num_right)


def _bits(number: int) -> int:
    return min(number.bit_length(), len(_CHANCES) - 1)
