"""Where prompts leave the last ones that began like them: why the prefix cache was of no use."""

from array import array
from collections import deque
from typing import NamedTuple

from headrace.fleet.served_model import ServedModel
from headrace.streams.record import Record
from headrace_common.log_context import Figure

_NUM_KEPT = 32
_NUM_ALIKE = 256  # tokens that a conversation's prompts share at least
_NUM_BEHIND = 128  # tokens at the end of a prompt that the next one need not have
_NUM_SHOWN = 12
_SIZE = 4  # bytes of a token


class KeptPrompt(NamedTuple):
    """A prompt, and whose it was: those of two owners are never compared."""

    whose: tuple[str, str, str]
    packed: bytes


class PromptTrail:
    """Keeps the last prompts; `shows_text`: it also tells the text at which one differs."""

    def __init__(self, shows_text: bool) -> None:
        self._shows_text = shows_text
        self._kept: deque[KeptPrompt] = deque(maxlen=_NUM_KEPT)

    def follow(self, record: Record, model: ServedModel) -> dict[str, Figure]:
        """Figures for the log of a prompt that leaves the last one before its end; else none."""
        if len(record.prompts) != 1 or not record.request.cache_prompt:
            return {}
        whose = (record.names.owner, record.request.cache_salt, record.request.model)
        new = KeptPrompt(whose, record.prompts[0])
        alike = self._alike(new)
        if not alike:
            self._kept.append(new)
            return {}
        num_shared, last = max(alike, key=lambda it: it[0])
        if 2 * num_shared * _SIZE >= len(last.packed):  # the same conversation
            self._kept.remove(last)
        self._kept.append(new)
        if num_shared >= len(last.packed) // _SIZE - _NUM_BEHIND:
            return {}
        figures: dict[str, Figure] = {"shared_tokens": num_shared}
        if self._shows_text:
            token_ids = array("i", new.packed[num_shared * _SIZE :][: _NUM_SHOWN * _SIZE])
            figures["differs_from_there"] = model.tokenizer.decode(token_ids.tolist(), False)
        return figures

    def _alike(self, new: KeptPrompt) -> list[tuple[int, KeptPrompt]]:
        """Return this owner's prompts with the same start, and how many tokens each shares."""
        start = new.packed[: _NUM_ALIKE * _SIZE]
        if len(start) < _NUM_ALIKE * _SIZE:
            return []
        return [
            (_num_shared(one.packed, new.packed), one)
            for one in self._kept
            if one.whose == new.whose and one.packed.startswith(start)
        ]


def _num_shared(one: bytes, other: bytes) -> int:
    """Return the number of tokens that both start with; their first `_NUM_ALIKE` are equal."""
    low, high = _NUM_ALIKE, min(len(one), len(other)) // _SIZE
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _SIZE, middle * _SIZE)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low
