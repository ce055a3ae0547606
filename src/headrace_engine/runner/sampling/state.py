"""Holds the state of a sequence that the runner keeps between two draws."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace_common.plan import Begin
from headrace_common.sampling import Sampling
from headrace_engine.runner.pooling import UNIT, PooledRows, VectorHead
from headrace_engine.runner.sampling.occurrences import Occurrences
from headrace_engine.runner.sampling.repeats import Repeats

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(dict[str, float]).decode


class Constraint(Protocol):
    """The grammar state of one answer."""

    def allowed(self, answer: "array[int]") -> NDArray[np.bool_]:
        """Return a mask over ids for the token after `answer`; ValueError if the grammar fails."""
        ...

    def forced(self, answer: "array[int]") -> tuple[int, ...]:
        """Return the tokens that must follow `answer`; no tokens if there is a choice."""
        ...


@dataclass(slots=True)
class SequenceState:
    """Holds a sequence's tokens so far, and everything needed to draw the next token."""

    token_ids: "array[int]"
    num_prompt: int
    choice: int
    sampling: Sampling
    constraint: Constraint | None = None
    # The pooled rows of a sequence that produces a vector; None for any other sequence.
    pooled: PooledRows | None = None
    # The counts of all tokens, for penalties.
    seen: Occurrences = field(default_factory=Occurrences)
    # The counts of the drawn tokens.
    drawn: Occurrences = field(init=False)
    # Repetitions among all tokens; None until the DRY sampler needs repetitions.
    repeats: Repeats | None = None
    # The memory of samplers after the last draw.
    remembered: dict[str, float] = field(default_factory=dict)
    # Whether penalties apply before the mask; False if penalties are one of the `samplers`.
    is_penalized: bool = field(init=False)

    def __post_init__(self) -> None:
        s = self.sampling
        has_penalty = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
        self.is_penalized = bool(has_penalty) and not s.samplers
        self.drawn = Occurrences(self.num_prompt)

    @classmethod
    def from_begin(
        cls, begin: Begin, constraint: Constraint | None = None, head: VectorHead = UNIT
    ) -> "SequenceState":
        # The tokens are copied because the copy grows with each draw.
        token_ids = begin.token_ids[:]
        sequence = cls(token_ids, begin.num_prompt, begin.choice, begin.sampling, constraint)
        if begin.sampling.pooling is not None:
            sequence.pooled = PooledRows(begin.sampling.pooling, head)
        if begin.state:
            sequence.remembered = _decode(begin.state)
        return sequence

    @property
    def state(self) -> bytes:
        """Return the memory of the samplers, for a later `Begin`."""
        return _encode(self.remembered)

    def repetitions(self) -> Repeats:
        """Return the repetitions among all tokens so far."""
        if self.repeats is None:
            self.repeats = Repeats(self.sampling.dry_breakers)
        self.repeats.update(self.token_ids)
        return self.repeats

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_over(self) -> bool:
        """Return whether the last drawn token ends the sequence."""
        sampling, num_generated = self.sampling, self.num_generated
        is_end = sampling.ends_with(self.token_ids[-1], num_generated)
        return is_end or num_generated == sampling.max_tokens

    def forced(self) -> tuple[int, ...]:
        answer = self.token_ids[self.num_prompt :]
        return () if self.constraint is None else self.constraint.forced(answer)
