"""One exchange of a training conversation, and the rule which exchanges are never trained on."""

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

HELD_OUT = 12  # one prompt in so many is kept for evaluation


@dataclass(frozen=True)
class Turn:
    ask: str
    answer: str
    thought: str = ""  # said between think marks where thinking is asked for
    key: str = ""  # what must not repeat between training and evaluation; the question if empty
    tools: tuple[dict[str, Any], ...] = field(default=())
    call: str = ""  # the call made before the answer, as JSON
    result: str = ""

    @property
    def is_held_out(self) -> bool:
        return crc32((self.key or self.ask).encode()) % HELD_OUT == 0
