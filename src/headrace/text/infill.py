"""Finds a tokenizer's marks, the special tokens of fill-in-the-middle prompts.

A prompt is: prefix-mark TEXT-BEFORE suffix-mark TEXT-AFTER middle-mark. The model then writes the
text between TEXT-BEFORE and TEXT-AFTER.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

TokenId = Callable[[str], int | None]

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # models: Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # models: StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # models: DeepSeek
)
_FILES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
_PADDING = ("<|fim_pad|>", "<fim_pad>")


class InfillMarks(NamedTuple):
    """Token ids of the marks. `file` precedes each file of a project, `project` the project's
    name.
    """

    prefix: int
    suffix: int
    middle: int
    project: int | None
    file: int | None
    # Tokens that end the filled-in text, in addition to the model's end tokens.
    ends: tuple[int, ...]

    def files(self, files: Sequence[tuple[str, str]]) -> Iterator[tuple[int | None, str]]:
        """Yield (mark, text) pairs for the other files of a project, before the file with the gap.

        A mark is None if the tokenizer has no such mark.
        """
        if not files:
            return
        if self.file is not None and self.project is not None:
            yield self.project, "project\n"
        for name, text in files:
            yield self.file, f"{name}\n{text}\n"
        if self.file is not None:
            yield self.file, "current\n"

    def joined(self, before: Iterable[int], behind: Iterable[int]) -> "array[int]":
        """Return the token ids of a prompt with the text before and after the gap."""
        return array("i", [self.prefix, *before, self.suffix, *behind, self.middle])


def infill_marks(token_id: TokenId) -> InfillMarks | None:
    """Return the tokenizer's marks, or None if the tokenizer has no marks."""
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
