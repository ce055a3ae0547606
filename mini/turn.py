"""One exchange of a training conversation, and the rule that holds some of them out of training."""

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

# One of this many prompts is kept for evaluation.
HELD_OUT = 12


@dataclass(frozen=True)
class Turn:
    ask: str
    answer: str
    # The text between the think marks, if thinking is requested.
    thought: str = ""
    # A key is never in both training and evaluation; the question is used if this is empty.
    key: str = ""
    tools: tuple[dict[str, Any], ...] = field(default=())
    # The tool call before the answer, as JSON.
    call: str = ""
    result: str = ""

    @property
    def is_held_out(self) -> bool:
        return crc32((self.key or self.ask).encode()) % HELD_OUT == 0
