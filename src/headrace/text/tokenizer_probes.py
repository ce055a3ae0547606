"""Generates random texts that are hard to tokenize in parts."""

import random
from collections.abc import Callable, Iterator, Sequence

_WORDS = """
the quick brown fox isn't we'll THEY'VE naïve Straße Ωμέγα привет foo_bar x1y2 lot süß ß ẞ i̇
e\u0301te\u0301 한국어 \u1112\u1161\u11ab\u1100\u1173\u11af שלום مرحبا हिन्दी 日本語 中文
A\u030a \u212b ﬁne ½ ① ㎏ ﷽ ⅷ ½½ ::= -> ... --- <| |> < > [MASK] ## ##ing"""
_BLANKS = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028")
_RUNS = " \n\t\u00a0aA0159.,-=_#'▁\x00é中字あ😀\u0301\u200d\ufe0f"
_EMOJI = ("😀", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "1️⃣", "🦊")
_MARKS = "\u0301\u0327\u0323\u0308\u0345\u093c\u05b0\u3099\u20dd"
_CJK = "日本語漢字かな交じり文中文文本也在这里。、한국어도"
_SIGNS = ".,;:!?'\"()[]{}<>|@#$%^&*-+=/\\~`_▁\x00\x7f\ufeff\ufffd\u200b"

Piece = Callable[[random.Random], str]


def hard_texts(seed: int, added_tokens: Sequence[str]) -> Iterator[str]:
    """Yield an endless series of texts.

    Each text is a mixture of at most 90 hard pieces, including added tokens.
    """
    dice = random.Random(seed)
    pieces = (*_PIECES, _added(added_tokens)) if added_tokens else _PIECES
    while True:
        favourite = dice.choice(pieces)
        chosen = dice.choices((*pieces, favourite, favourite, favourite), k=dice.randint(1, 90))
        yield "".join(piece(dice) for piece in chosen)


def _words(dice: random.Random) -> str:
    return " ".join(dice.choices(_WORDS.split(), k=dice.randint(1, 8)))


def _blanks(dice: random.Random) -> str:
    return "".join(dice.choices(_BLANKS, k=dice.randint(1, 6)))


def _run(dice: random.Random) -> str:
    """Return one repeated character: usually a short text, at most 1,500 characters."""
    return dice.choice(_RUNS) * min(1500, int(1.5 ** (18 * dice.random() ** 2)))


def _digits(dice: random.Random) -> str:
    return "".join(dice.choices("0123456789", k=dice.choice((1, 2, 3, 4, 7, 30, 300, 1200))))


def _emoji(dice: random.Random) -> str:
    return "".join(dice.choices(_EMOJI, k=dice.randint(1, 5)))


def _marks(dice: random.Random) -> str:
    return dice.choice("aeo한中 ") + "".join(dice.choices(_MARKS, k=dice.choice((1, 2, 9, 60))))


def _cjk(dice: random.Random) -> str:
    return "".join(dice.choices(_CJK, k=dice.randint(1, 40)))


def _signs(dice: random.Random) -> str:
    return "".join(dice.choices(_SIGNS, k=dice.randint(1, 12)))


_PIECES: tuple[Piece, ...] = (
    _words, _words, _blanks, _run, _digits, _emoji, _marks, _cjk, _signs,
)  # fmt: skip


def _added(tokens: Sequence[str]) -> Piece:
    """Return a function that makes a whole or broken token, with blanks or letters next to it."""

    def piece(dice: random.Random) -> str:
        token = dice.choice(tokens)
        if dice.random() < 0.4:
            token = token[dice.randrange(len(token)) :] + token[: dice.randrange(len(token) + 1)]
        beside = ("", " ", "  ", "x", "\n", ".", " " * dice.choice((9, 90, 900)))
        return dice.choice(beside) + token + dice.choice(beside)

    return piece
