"""Runs a draft model, a small model that chooses guesses for the served model.

The draft model is another model, or the served model's own MTP layer (see lanes/mtp.py).

The cache of the draft model has the same block ids as the cache of the served model. So cached
prefixes, forks and preemptions need no bookkeeping for the draft model. What the draft model
caches cannot change a text, because every guess is verified.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import DraftFacts
from headrace_common.plan import BlockCopy, Chunk, SlotCopy
from headrace_engine.runner.lanes.mtp import MtpLane
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.sampling.philox import uniform
from headrace_engine.runner.sampling.sampler import sample
from headrace_engine.runner.sampling.state import SequenceState
from headrace_engine.runner.storage import CacheStorage


class DraftLane(Protocol):
    """The methods of a lane that a drafter uses."""

    spec: ModelSpec

    @property
    def storage(self) -> CacheStorage | None: ...
    def open(self, layout: MemoryLayout) -> None: ...
    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None: ...
    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor: ...
    def logits(self, rows: Tensor) -> Tensor: ...


class Drafter:
    """Runs the draft model: processes the tokens so far, and chooses the tokens of guesses."""

    def __init__(self, lane: DraftLane, facts: DraftFacts) -> None:
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
        """Process the tokens that the chunks ask for; return the chunks with all guesses chosen.

        The first forward pass processes all these tokens. Each further pass processes the last
        chosen token of every guess that is not complete yet.
        """
        reading = [chunk for chunk in chunks if self._reads(chunk)]
        if not reading:
            return tuple(chunks)
        parts, tokens = [], []
        for chunk in reading:
            start, end = self._first(chunk), chunk.draft_end
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

    def after(self, chunks: Sequence[Chunk], sequences: Mapping[SequenceId, SequenceState]) -> None:
        """Let the drafter use the hidden states that the served model has just computed."""

    def end(self, sequence_id: SequenceId) -> None:
        """Release what is stored for a sequence."""

    def _reads(self, chunk: Chunk) -> bool:
        """Return whether `run` processes tokens of the chunk."""
        return chunk.draft_end > chunk.draft_start

    def _first(self, chunk: Chunk) -> int:
        """Return the index in the sequence of the first token that `run` processes."""
        return chunk.draft_start

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

        If a request draws at random, the draft model uses the random number with which the served
        model will draw the token at the same position. So both models often draw the same token,
        even if several tokens are likely.
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


class MtpDrafter(Drafter):
    """Drafts with the MTP layer of the served model, which needs the model's hidden states.

    The hidden states of a prompt only exist after the model has processed the prompt's chunk. So
    the layer processes prompts in `after`, and everything else in `run`.
    """

    def __init__(self, lane: MtpLane, facts: DraftFacts, served: NativeText) -> None:
        super().__init__(lane, facts)
        self._mtp, self._served = lane, served
        # For each sequence, the index of the first token of the last guess. The layer processed
        # these tokens with its own hidden states.
        self._guessed_from: dict[SequenceId, int] = {}

    def after(self, chunks: Sequence[Chunk], sequences: Mapping[SequenceId, SequenceState]) -> None:
        hidden, end = self._served.last_hidden, 0
        parts, tokens, before = [], [], []
        for chunk in chunks:
            rows = hidden[end : end + chunk.length]
            end += chunk.length
            sequence, start = sequences[chunk.sequence_id], chunk.draft_start
            if _reads_prompt(chunk):
                self._guessed_from.pop(chunk.sequence_id, None)
                num = chunk.draft_end - start
                parts.append(_part(chunk, start, num, False))
                tokens.append(sequence.token_ids[start : chunk.draft_end])
                before.append(self._mtp.past(chunk.sequence_id).get(start - 1, start))
                before.append(rows[: num - 1])
            if sequence.pooled is None and sequence.sampling.guess:
                for sequence_id in chunk.draws or (chunk.sequence_id,):
                    self._mtp.past(sequence_id).put(chunk.start, rows)
        if parts:
            self._mtp.read(parts, tokens, torch.cat(before))

    def end(self, sequence_id: SequenceId) -> None:
        self._mtp.end(sequence_id)
        self._guessed_from.pop(sequence_id, None)

    def _reads(self, chunk: Chunk) -> bool:
        return super()._reads(chunk) and not _reads_prompt(chunk)

    def _first(self, chunk: Chunk) -> int:
        """Return the index from which the layer must continue: the start of the last guess, if any.

        The layer processes the correct tokens of this guess again, with the served model's hidden
        states.
        """
        first = min(self._guessed_from.pop(chunk.sequence_id, chunk.draft_start), chunk.draft_start)
        if chunk.is_drafted:
            self._guessed_from[chunk.sequence_id] = chunk.draft_end
        return first


def _reads_prompt(chunk: Chunk) -> bool:
    """Return whether both models process the same prompt tokens for this chunk."""
    return not chunk.guess and chunk.draft_end > max(chunk.start, chunk.draft_start)


def _part(chunk: Chunk, start: int, length: int, has_row: bool) -> Chunk:
    """Return a chunk for the draft model, with the block numbers of the served model's `chunk`."""
    return Chunk(chunk.sequence_id, start, length, int(has_row), (), chunk.block_ids)
