"""The runner's state of a sequence between two draws."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace_common.plan import Begin
from headrace_common.sampling import Sampling
from headrace_engine.runner.pooling import UNIT, PooledRows, VectorHead
from headrace_engine.runner.sampling.occurrences import Occurrences


class Constraint(Protocol):
    """The state of one answer in its grammar."""

    def allowed(self, answer: "array[int]") -> NDArray[np.bool_]:
        """Return which tokens may follow these, by id; raise ValueError if the grammar fails."""
        ...

    def forced(self, answer: "array[int]") -> tuple[int, ...]:
        """Return tokens that spell the text that must follow; none if there is a choice."""
        ...


@dataclass(slots=True)
class SequenceState:
    """Tokens known so far, the drawn ones appended, and how to draw the next."""

    token_ids: "array[int]"
    num_prompt: int
    choice: int
    sampling: Sampling
    constraint: Constraint | None = None
    pooled: PooledRows | None = None  # of one that draws nothing
    seen: Occurrences = field(default_factory=Occurrences)  # of all tokens, if it is penalized
    drawn: Occurrences = field(init=False)  # of those drawn
    is_penalized: bool = field(init=False)  # before the mask; False if `samplers` do it instead

    def __post_init__(self) -> None:
        s = self.sampling
        has_penalty = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
        self.is_penalized = bool(has_penalty) and not s.samplers
        self.drawn = Occurrences(self.num_prompt)

    @classmethod
    def from_begin(
        cls, begin: Begin, constraint: Constraint | None = None, head: VectorHead = UNIT
    ) -> "SequenceState":
        # A copy of our own: it grows with each draw.
        token_ids = begin.token_ids[:]
        known = cls(token_ids, begin.num_prompt, begin.choice, begin.sampling, constraint)
        if begin.sampling.pooling is not None:
            known.pooled = PooledRows(begin.sampling.pooling, head)
        return known

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_over(self) -> bool:
        """Whether the last token, which was drawn, ends it."""
        sampling, num_generated = self.sampling, self.num_generated
        is_end = sampling.ends_with(self.token_ids[-1], num_generated)
        return is_end or num_generated == sampling.max_tokens

    def forced(self) -> tuple[int, ...]:
        answer = self.token_ids[self.num_prompt :]
        return () if self.constraint is None else self.constraint.forced(answer)
