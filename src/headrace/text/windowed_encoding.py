"""Encodes a long text in overlapping windows, with bounded memory and the ids of a single call.

left   |----------------------------|
right                        |----------------------------|
                             overlap
                                ^ cut: the left window's tokens before the cut, then the right
                                  window's tokens

Near the border of a window, the window's tokens differ from the tokens of the whole text: words
are cut, spaces are prefixed, and characters are not composed. Where both windows have the same
tokens, the borders have no influence. A word that begins at such a place in a window also begins
at this place in the whole text.
"""

from array import array
from bisect import bisect_left
from typing import NamedTuple

import msgspec

from headrace.text.tokenizer import Tokenizer

Outer = tuple["array[int]", "array[int]"]
NO_OUTER: Outer = (array("i"), array("i"))


class Sizes(msgspec.Struct, frozen=True):
    """Sizes in characters; a text of up to `window` is encoded in one call."""

    window: int = 64 << 10
    overlap: int = 4 << 10
    # The minimum number of consecutive tokens that are equal in both windows around a cut.
    min_run: int = 6
    # The minimum size of a piece. Pieces are cut at special tokens and need no overlap.
    piece: int = 1 << 10


class Window(NamedTuple):
    """The tokens of text[start:end]; each span is (start, end) in the whole text."""

    start: int
    end: int
    ids: list[int]
    spans: list[tuple[int, int]]
    words: list[int | None]

    def begins_word(self, index: int) -> bool:
        return self.words[index] != self.words[index - 1]


class Cut(NamedTuple):
    """A cut: the left window's tokens before index `left`, then the right window's from `right`
    on.
    """

    left: int
    right: int


class WindowedText:
    """Encodes one text; each `advance` encodes one window, so that several texts can take turns.

    `outer` contains the special tokens before and after the text. Encoding stops after more than
    `limit` tokens: `is_over` is set, and the rest of the text is not read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str,
        sizes: Sizes,
        outer: Outer = NO_OUTER,
        limit: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._sizes = sizes
        self._before, self._after = outer
        self._limit = limit
        self._left: Window | None = None
        # The tokens of `_left` before this index have been taken.
        self._first = 0
        self.token_ids = self._before[:]
        self.is_over = False

    def advance(self) -> bool:
        """Encode one more window; return False when the text is done or `is_over` is set."""
        if self._left is None:
            self._left = self._encode(0, self._sizes.window)
        else:
            self._join(self._left)
        if self._left.end == len(self._text):
            self._take([*self._left.ids[self._first :], *self._after])
            return False
        return not self.is_over

    def _join(self, left: Window) -> None:
        right = self._encode(left.end - self._sizes.overlap, self._sizes.window)
        cut = self._cut(left, right)
        if cut is None:
            self._widen(left)
            return
        self._take(left.ids[self._first : cut.left])
        self._left, self._first = right, cut.right

    def _widen(self, left: Window) -> None:
        """Make the left window four times as long, because no cut was found in the overlap."""
        wide = self._encode(left.start, 4 * (left.end - left.start))
        known = self._first + self._sizes.min_run if self._first else 0
        if wide.ids[:known] == left.ids[:known] and wide.spans[:known] == left.spans[:known]:
            self._left = wide
            return
        self._left, self._first = self._encode(0, len(self._text)), 0
        self.token_ids = self._before[:]

    def _encode(self, start: int, length: int) -> Window:
        text = self._text[start : start + length]
        found = self._tokenizer.encode_spans(text)
        spans = [(start + begin, start + end) for begin, end in found.offsets]
        return Window(start, start + len(text), found.ids, spans, found.word_ids)

    def _take(self, ids: list[int]) -> None:
        self.token_ids.extend(ids)
        self.is_over = self._limit is not None and len(self.token_ids) > self._limit

    def _cut(self, left: Window, right: Window) -> Cut | None:
        """Return the possible cut nearest to the middle of the overlap, or None."""
        middle = (right.start + left.end) // 2
        places = [
            (abs(left.spans[cut.left][0] - middle), cut, run[-1])
            for run in agreeing_runs(left, right, self._sizes.min_run)
            for cut in run
            if cut.left > self._first
        ]
        fitting = (cut for _, cut, last in sorted(places) if self._can_cut(left, right, cut, last))
        return next(fitting, None)

    def _can_cut(self, left: Window, right: Window, cut: Cut, last: Cut) -> bool:
        begins_word = left.begins_word(cut.left) and right.begins_word(cut.right)
        before, token = left.ids[cut.left - 1], left.ids[cut.left]
        if not begins_word and not self._tokenizer.is_cut_by_mark(before, token):
            return False
        ahead = self._text[left.spans[cut.left][0] : left.spans[last.left][1]]
        return _has_two_classes(ahead)


def agreeing_runs(left: Window, right: Window, min_run: int) -> list[list[Cut]]:
    """Return the runs of tokens that are equal in both windows, by id and span.

    A run has at least `min_run` tokens. The first token is left out of the result, because a cut
    before this token would follow a token that differs.
    """
    num_right = bisect_left(right.spans, (left.end, 0))
    overlap = zip(right.ids[:num_right], right.spans, strict=False)
    place = {token: index for index, token in enumerate(overlap)}
    runs: list[list[Cut]] = []
    run: list[Cut] = []
    for index in range(bisect_left(left.spans, (right.start, 0)), len(left.ids)):
        match = place.get((left.ids[index], left.spans[index]), -1)
        if run and match != run[-1].right + 1:
            runs.append(run)
            run = []
        if match >= 0:
            run.append(Cut(index, match))
    runs.append(run)
    return [run[1:] for run in runs if len(run) >= min_run]


def _has_two_classes(text: str) -> bool:
    """Return whether the text has characters of more than one class.

    The classes are white space, digits, letters and everything else. A tokenizer may read a long
    run of one class as a whole: blanks that the next token absorbs, or digits that are grouped
    from the right. So the equal tokens after a cut must reach beyond the run.
    """
    first = _class_of(text[:1])
    return any(_class_of(character) != first for character in text)


def _class_of(character: str) -> int:
    if character.isspace():
        return 0
    return 1 if character.isdecimal() else 2 if character.isalpha() else 3
