"""Philox 4x32-10, a stateless random generator: a key and a counter determine the number.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

from typing import Literal

Words = tuple[int, int, int, int]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Run ten rounds over four 32-bit words."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (right >> 32) ^ b ^ k0,
            right & _WORD,
            (left >> 32) ^ d ^ k1,
            left & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return a, b, c, d


def uniform(seed: int, token: int, choice: int, stream: Literal[0, 1] = 0) -> float:
    """Return a number in [0, 1) with 53 random bits, for a token index and a choice.

    The key is the seed's 64 bits. The counter is four words: two of the token index, then two of
    the choice, the low word first. Stream 0 uses the first two of the four random words, and
    stream 1 uses the last two.
    """
    words = philox((*_split(token), *_split(choice)), _split(seed))
    low, high = words[2 * stream : 2 * stream + 2]
    return ((high << 32 | low) >> 11) * 2.0**-53


def _split(number: int) -> tuple[int, int]:
    return number & _WORD, number >> 32 & _WORD
