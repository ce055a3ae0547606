"""Runs a draft model, a small model that chooses guesses for the served model.

The cache of the draft model has the same block ids as the cache of the served model. So cached
prefixes, forks and preemptions need no bookkeeping for the draft model. What the draft model
caches cannot change a text, because every guess is verified.
"""

from array import array
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from torch import Tensor

from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import DraftFacts
from headrace_common.plan import BlockCopy, Chunk
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.sampling.philox import uniform
from headrace_engine.runner.sampling.sampler import sample
from headrace_engine.runner.sampling.state import SequenceState
from headrace_engine.runner.storage import CacheStorage


class Drafter:
    """Reads tokens into the draft model's cache, and chooses the tokens of guesses."""

    def __init__(self, lane: NativeText, facts: DraftFacts) -> None:
        self.facts = facts
        self._lane = lane
        # Set by `open`: the number of token ids that both models have.
        self._num_ids = lane.spec.vocab_size

    @property
    def storage(self) -> CacheStorage | None:
        return self._lane.storage

    def open(self, layout: MemoryLayout, vocab_size: int) -> None:
        """Allocate a cache with the blocks of the served model's `layout`."""
        self._num_ids = min(self._num_ids, vocab_size)
        self._lane.open(msgspec.structs.replace(layout, num_slots=0, num_snapshots=0))

    def copy(self, blocks: Sequence[BlockCopy]) -> None:
        self._lane.copy(blocks, ())

    def run(
        self, chunks: Sequence[Chunk], sequences: Mapping[SequenceId, SequenceState]
    ) -> tuple[Chunk, ...]:
        """Read the tokens that the chunks ask for; return the chunks with all guesses chosen.

        The first forward pass reads all tokens. Each further pass reads the last chosen token of
        every guess that is not complete yet.
        """
        reading = [chunk for chunk in chunks if chunk.draft_end > chunk.draft_start]
        if not reading:
            return tuple(chunks)
        parts, tokens = [], []
        for chunk in reading:
            start, end = chunk.draft_start, chunk.draft_end
            parts.append(_part(chunk, start, end - start, chunk.is_drafted))
            tokens.append(sequences[chunk.sequence_id].token_ids[start:end])
        rows = self._forward(parts, tokens)
        guesses: dict[SequenceId, array[int]] = {}
        drafting = [chunk for chunk in reading if chunk.is_drafted]
        while drafting:
            self._choose(rows, drafting, sequences, guesses)
            drafting = [c for c in drafting if len(guesses[c.sequence_id]) < len(c.guess)]
            if drafting:
                chosen = [guesses[chunk.sequence_id] for chunk in drafting]
                starts = [
                    chunk.draft_end + len(guess) - 1
                    for chunk, guess in zip(drafting, chosen, strict=True)
                ]
                parts = [
                    _part(c, start, 1, True) for c, start in zip(drafting, starts, strict=True)
                ]
                rows = self._forward(parts, [guess[-1:] for guess in chosen])
        return tuple(
            msgspec.structs.replace(chunk, guess=tuple(guesses[chunk.sequence_id]))
            if chunk.is_drafted
            else chunk
            for chunk in chunks
        )

    def _forward(self, parts: Sequence[Chunk], tokens: Sequence["array[int]"]) -> Tensor:
        if self._num_ids < max(map(max, tokens)) + 1:
            last = self._num_ids - 1
            tokens = [array("i", (min(i, last) for i in each)) for each in tokens]
        return self._lane.forward(parts, tokens)

    def _choose(
        self,
        rows: Tensor,
        drafting: Sequence[Chunk],
        sequences: Mapping[SequenceId, SequenceState],
        guesses: "dict[SequenceId, array[int]]",
    ) -> None:
        """Append a token to each guess.

        A request that draws at random uses the random number with which the served model will
        draw the same token. So both models often draw the same token, even if several tokens are
        likely.
        """
        logits = self._lane.logits(rows)[:, : self._num_ids].numpy()
        for row, chunk in zip(logits, drafting, strict=True):
            sequence = sequences[chunk.sequence_id]
            guess = guesses.setdefault(chunk.sequence_id, array("i"))
            sampling, number = sequence.sampling, sequence.num_generated + len(guess)
            if sampling.masks_ends(number):
                row[[i for i in sampling.end_token_ids if i < len(row)]] = -np.inf
            token_id = int(row.argmax())
            is_random = not sampling.is_greedy and sampling.temperature > 0
            if is_random and np.isfinite(row[token_id]):
                dice = uniform(sampling.seed, number, sequence.choice)
                token_id = sample(row, sampling, dice)
            guess.append(token_id)


def _part(chunk: Chunk, start: int, length: int, has_row: bool) -> Chunk:
    """Return a chunk of the draft model that continues the cache of `chunk`."""
    return Chunk(chunk.sequence_id, start, length, int(has_row), (), chunk.block_ids)
