"""Reports where a prompt differs from a similar earlier prompt.

The prefix cache can be used only up to this difference.
"""

from array import array
from collections import deque
from typing import NamedTuple

from headrace.fleet.served_model import ServedModel
from headrace.streams.record import Record
from headrace_common.log_context import Figure

_NUM_KEPT = 32
# Two prompts belong to one conversation only if they share at least this many tokens.
_NUM_ALIKE = 256
# A difference within this many tokens of the earlier prompt's end is not reported.
_NUM_BEHIND = 128
_NUM_SHOWN = 12
_SIZE = 4  # bytes per token


class RecentPrompt(NamedTuple):
    """A prompt with its owner, cache salt and model.

    Two prompts are compared only if owner, cache salt and model are equal.
    """

    whose: tuple[str, str, str]
    packed: bytes


class PrefixMisses:
    """Compares each new prompt with the latest prompts.

    If `shows_text`, the report also contains the new prompt's text at the difference.
    """

    def __init__(self, shows_text: bool) -> None:
        self._shows_text = shows_text
        self._kept: deque[RecentPrompt] = deque(maxlen=_NUM_KEPT)

    def follow(self, record: Record, model: ServedModel) -> dict[str, Figure]:
        """Return log fields about the difference between a prompt and the most similar earlier
        prompt.

        The result is empty if no earlier prompt is similar, or if the two prompts differ only
        near the end of the earlier prompt.
        """
        if len(record.prompts) != 1 or not record.request.cache_prompt:
            return {}
        whose = (record.names.owner, record.request.cache_salt, record.request.model)
        new = RecentPrompt(whose, record.prompts[0])
        alike = self._alike(new) if len(new.packed) >= _NUM_ALIKE * _SIZE else []
        if not alike:
            self._kept.append(new)
            return {}
        num_shared, last = max(alike, key=lambda it: it[0])
        # A prompt that shares half of the earlier prompt continues the same conversation. Keep
        # only the newer prompt.
        if 2 * num_shared * _SIZE >= len(last.packed):
            self._kept.remove(last)
        self._kept.append(new)
        if num_shared >= len(last.packed) // _SIZE - _NUM_BEHIND:
            return {}
        figures: dict[str, Figure] = {"shared_tokens": num_shared}
        if self._shows_text:
            token_ids = array("i", new.packed[num_shared * _SIZE :][: _NUM_SHOWN * _SIZE])
            figures["differs_from_there"] = model.tokenizer.decode(token_ids.tolist(), False)
        return figures

    def _alike(self, new: RecentPrompt) -> list[tuple[int, RecentPrompt]]:
        """Return the earlier prompts that share at least `_NUM_ALIKE` tokens with `new`.

        Each tuple contains the number of shared tokens and the earlier prompt.
        """
        start = new.packed[: _NUM_ALIKE * _SIZE]
        return [
            (_num_shared(one.packed, new.packed), one)
            for one in self._kept
            if one.whose == new.whose and one.packed.startswith(start)
        ]


def _num_shared(one: bytes, other: bytes) -> int:
    """Return how many leading tokens two prompts share, which are at least `_NUM_ALIKE`."""
    low, high = _NUM_ALIKE, min(len(one), len(other)) // _SIZE
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _SIZE, middle * _SIZE)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low
