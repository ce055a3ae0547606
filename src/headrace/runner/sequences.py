"""What the runner remembers of a sequence between steps."""

from array import array
from dataclasses import dataclass

from headrace.core.plan import Begin
from headrace.core.sampling import Sampling


@dataclass(slots=True)
class SequenceState:
    """Tokens known so far, the drawn ones appended, and how to draw the next."""

    token_ids: "array[int]"
    num_prompt: int
    choice: int
    sampling: Sampling

    @classmethod
    def from_begin(cls, begin: Begin) -> "SequenceState":
        # A copy of our own: it grows with each draw.
        return cls(begin.token_ids[:], begin.num_prompt, begin.choice, begin.sampling)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt
