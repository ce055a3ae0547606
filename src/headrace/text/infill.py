"""Filling in the middle: the marks by which models tell what stands before and behind a gap.

prefix-mark TEXT BEFORE suffix-mark TEXT BEHIND middle-mark -> what belongs between them
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

TokenId = Callable[[str], int | None]

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
_FILES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
_PADDING = ("<|fim_pad|>", "<fim_pad>")


class InfillMarks(NamedTuple):
    """Token ids. `file` stands before each file of a project, `project` before its name."""

    prefix: int
    suffix: int
    middle: int
    project: int | None
    file: int | None
    ends: tuple[int, ...]  # with which a model ends what it fills in, beside its end tokens

    def files(self, files: Sequence[tuple[str, str]]) -> Iterator[tuple[int | None, str]]:
        """The texts before the gap's own file, each with the mark before it, if any."""
        if not files:
            return
        if self.file is not None and self.project is not None:
            yield self.project, "project\n"
        for name, text in files:
            yield self.file, f"{name}\n{text}\n"
        if self.file is not None:
            yield self.file, "current\n"

    def joined(self, before: Iterable[int], behind: Iterable[int]) -> "array[int]":
        """The prompt of both sides of a gap."""
        return array("i", [self.prefix, *before, self.suffix, *behind, self.middle])


def infill_marks(token_id: TokenId) -> InfillMarks | None:
    """The marks that a tokenizer has; None if it has none."""
    for names in _FAMILIES:
        prefix, suffix, middle = map(token_id, names)
        if prefix is not None and suffix is not None and middle is not None:
            project, file = next(
                (found for pair in _FILES if (found := tuple(map(token_id, pair)))[1] is not None),
                (None, None),
            )
            others = (*map(token_id, _PADDING), project, file)
            ends = tuple(id for id in others if id is not None)
            return InfillMarks(prefix, suffix, middle, project, file, ends)
    return None
