"""Executes plans: processes chunks, draws tokens and keeps the tokens of each sequence."""

import functools
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import cast

import msgspec
import torch
from torch import Tensor

from headrace_common.adapter import Adapter
from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId
from headrace_common.plan import (
    NO_SLOT,
    Chunk,
    ChunkResult,
    Drawn,
    EncodeChunk,
    Load,
    PromptInputs,
    StepPlan,
    StepResult,
)
from headrace_common.sampling import Logprobs, Sampling
from headrace_engine.runner.adapters import AdaptableLane, Adapters, ReadAdapter
from headrace_engine.runner.block_bytes import BlockBytes
from headrace_engine.runner.drafter import Drafter
from headrace_engine.runner.lanes.lane import EncodingLane, Lane
from headrace_engine.runner.pooling import UNIT, PooledRows, VectorHead
from headrace_engine.runner.sampling.logprobs import join, pack_logprobs
from headrace_engine.runner.sampling.sampler import draw, draw_guessed
from headrace_engine.runner.sampling.state import Constraint, SequenceState

# Prompt logits are computed for this many rows at a time: 64 × 150,000 × 4 bytes = 38 MB.
_ROWS_AT_ONCE = 64


def _unconstrained(sampling: Sampling) -> Constraint | None:
    return None


class Runner:
    """Runs plans in launch order."""

    def __init__(
        self,
        lane: Lane,
        head: VectorHead = UNIT,
        constrain: Callable[[Sampling], Constraint | None] = _unconstrained,
        tells_forced: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        """`head` makes vectors; `constrain` returns the grammar state of a new sequence, if any.

        If `tells_forced` is true, a draw also returns the tokens that the grammar forces next,
        for use as a guess. `drafter` chooses guesses with a draft model.
        """
        self.lane = lane
        self.drafter = drafter
        self.head = head
        self._constrain = constrain
        self._tells_forced = tells_forced
        # While any adapter is loaded, this is the forward of `Adapters`.
        self.forward = lane.forward
        self._sequences: dict[SequenceId, SequenceState] = {}
        # The inputs of all sequences with encoder inputs.
        self._inputs: dict[SequenceId, PromptInputs] = {}

    @functools.cached_property
    def numbers(self) -> BlockBytes | None:
        """Return an object that copies the cache as bytes; None if the lane has no `storage`."""
        storage = self.lane.storage
        draft = None if self.drafter is None else self.drafter.storage
        return None if storage is None else BlockBytes(storage, *([] if draft is None else [draft]))

    @functools.cached_property
    def adapters(self) -> Adapters:
        """Return the adapters of the lane; ModelError if the lane does not support adapters."""
        if not self.lane.traits.takes_adapters:
            raise ModelError(
                f"Lane {self.lane.traits.id} does not support adapters. Use a native lane, or "
                "merge the model and the adapter with `headrace merge`."
            )
        return Adapters(cast(AdaptableLane, self.lane))

    @torch.inference_mode()
    def read_adapter(self, adapter: Adapter) -> ReadAdapter:
        """Read an adapter, possibly during a step; ModelError if the adapter cannot be read."""
        return self.adapters.read(adapter)

    @torch.inference_mode()
    def put_adapter(self, read: ReadAdapter) -> None:
        """Let chunks use an adapter that was read."""
        self.adapters.put(read)
        self.forward = self.adapters.forward

    def drop_adapter(self, fingerprint: str) -> None:
        """Remove an adapter that no chunk uses any more."""
        self.adapters.drop(fingerprint)
        if not self.adapters:
            self.forward = self.lane.forward

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "PendingStep":
        """Process the chunks of a plan.

        Raises MemoryError, here or from `PendingStep.result`, if the device is out of memory.
        """
        started = time.perf_counter()
        for sequence_id in plan.ended:
            self._sequences.pop(sequence_id, None)
            if self.drafter is not None:
                self.drafter.end(sequence_id)
            if self._inputs.pop(sequence_id, None) is not None:
                self._encoding.end(sequence_id)
        for begin in plan.begun:
            self._sequences[begin.sequence_id] = SequenceState.from_begin(
                begin, self._constrain(begin.sampling), self.head
            )
            if begin.inputs.works:
                # If this call raises an error, `end` must not be called for the sequence.
                self._encoding.begin(begin.sequence_id, begin.inputs)
                self._inputs[begin.sequence_id] = begin.inputs
        encode_s, load_s, draft_s = [], 0.0, 0.0
        rows = torch.empty(0)
        try:
            if plan.restores:
                self.lane.copy((), plan.restores)
            if plan.loads:
                load_s = self._load(plan.loads)
            encode_s = [self._encode(encoded) for encoded in plan.encoded]
            if plan.chunks:
                plan, draft_s = self._draft(plan)
                rows = self._compute(plan.chunks)
            if plan.block_copies or plan.slot_copies:
                self.lane.copy(plan.block_copies, plan.slot_copies)
                if self.drafter is not None:
                    self.drafter.copy(plan.block_copies)
        except RuntimeError as error:
            _raise_if_memory_is_short(error)
            raise
        return PendingStep(self, plan, rows, started, tuple(encode_s), load_s, draft_s)

    def _draft(self, plan: StepPlan) -> tuple[StepPlan, float]:
        """Return the plan with the guesses that the draft model chose, and how long this took."""
        if self.drafter is None:
            return plan, 0.0
        started = time.perf_counter()
        chunks = self.drafter.run(plan.chunks, self._sequences)
        return msgspec.structs.replace(plan, chunks=chunks), time.perf_counter() - started

    def _load(self, loads: Sequence[Load]) -> float:
        """Copy cached prefixes into their blocks; return the seconds that the copy took."""
        started = time.perf_counter()
        assert self.numbers is not None, "only lanes with `storage` can load cached prefixes"
        for load in loads:
            slot_id = None if load.slot_id == NO_SLOT else load.slot_id
            for part in load.segments:
                self.numbers.put(part.numbers, part.num_blocks, part.skip, part.block_ids, slot_id)
        return time.perf_counter() - started

    @property
    def _encoding(self) -> EncodingLane:
        # Only encoding lanes have sequences with encoder inputs.
        return cast(EncodingLane, self.lane)

    def _encode(self, chunk: EncodeChunk) -> float:
        """Run units of an encoder; return the seconds, or 0 if the result was already cached."""
        started = time.perf_counter()
        work = self._inputs[chunk.sequence_id].works[chunk.work]
        if not self._encoding.encode(chunk, work):
            return 0.0
        self.wait()
        return time.perf_counter() - started

    def _compute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run the chunks' tokens through the model; return each chunk's last `num_rows` rows."""
        tokens = []
        for chunk in chunks:
            num_known = chunk.length - len(chunk.guess)
            known = self._sequences[chunk.sequence_id].token_ids
            token_ids = known[chunk.start : chunk.start + num_known]
            assert len(token_ids) == num_known, "a chunk goes past the known tokens"
            token_ids.extend(chunk.guess)
            tokens.append(token_ids)
        rows = self.forward(chunks, tokens)
        if self.drafter is not None:
            self.drafter.after(chunks, self._sequences)
        return rows

    def wait(self) -> None:
        """Wait until the device has computed everything, so that a measured time is complete.

        A GPU computes in the background. Drawing a token waits for the GPU, but a step without a
        draw would end as soon as its work is queued.
        """
        if self.lane.device.type == "cuda":
            torch.cuda.synchronize(self.lane.device)

    def finish(self, plan: StepPlan, rows: Tensor) -> tuple[ChunkResult, ...]:
        """Draw tokens after the forward pass of a plan, and append each token to its sequence."""
        if not plan.chunks:
            return ()
        parts = rows.split([chunk.num_rows for chunk in plan.chunks])
        drawn = iter(self._draw(plan.chunks, parts))
        results = []
        for chunk, part in zip(plan.chunks, parts, strict=True):
            sequence = self._sequences[chunk.sequence_id]
            if sequence.pooled is not None:
                results.append(self._pooled(chunk, part, sequence.pooled))
                continue
            logprobs = None
            if sequence.sampling.num_prompt_logprobs is not None:
                logprobs = self._prompt_logprobs(chunk, part)
            draws = tuple(islice(drawn, len(chunk.draws)))
            results.append(ChunkResult(drawn=draws, prompt_logprobs=logprobs))
        return tuple(results)

    def _pooled(self, chunk: Chunk, rows: Tensor, pooled: PooledRows) -> ChunkResult:
        pooled.add(rows, self.lane.logits)
        if chunk.start + chunk.length < self._sequences[chunk.sequence_id].num_prompt:
            return ChunkResult()
        vector = pooled.vector()
        error = None if vector else "The model's output for this input contains NaN or infinity."
        return ChunkResult(vector=vector or b"", error=error)

    def _draw(self, chunks: Sequence[Chunk], parts: Sequence[Tensor]) -> list[Drawn]:
        """Draw for each sequence, chunk by chunk.

        Choices of one prompt draw from the same row. A chunk with a guess of n tokens has n + 1
        rows: row i, counted from 0, follows the first i tokens of the guess. The
        output layer computes all rows together. Each sequence draws from row 0, and continues
        with the next row while the drawn token equals the guessed token.
        """
        rows: list[Tensor] = []
        # For each sequence, the index of the sequence's first row.
        row_indices: list[int] = []
        sequences: list[SequenceState] = []
        guesses: list[tuple[int, ...]] = []
        num_rows = 0
        for chunk, part in zip(chunks, parts, strict=True):
            if not chunk.draws:
                continue
            rows.append(part[len(part) - 1 - len(chunk.guess) :])
            for sequence_id in chunk.draws:
                row_indices.append(num_rows)
                sequences.append(self._sequences[sequence_id])
                guesses.append(chunk.guess)
            num_rows += 1 + len(chunk.guess)
        if not rows:
            return []
        logits = self.lane.logits(torch.cat(rows))  # [rows, vocab]
        first_rows = logits if row_indices == list(range(num_rows)) else logits[row_indices]
        results = []
        for row, sequence, drawn, guess in zip(
            row_indices, sequences, draw(first_rows, sequences), guesses, strict=True
        ):
            sequence.token_ids.extend(drawn.token_ids)
            if guess:
                drawn = draw_guessed(logits[row:], sequence, drawn, guess)
            if self._tells_forced and sequence.constraint is not None:
                drawn = _with_forced(sequence, drawn)
            results.append(drawn)
        return results

    def _prompt_logprobs(self, chunk: Chunk, rows: Tensor) -> Logprobs | None:
        """Return the log probabilities of the prompt tokens that follow the chunk's tokens."""
        sequence = self._sequences[chunk.sequence_id]
        count = sequence.sampling.num_prompt_logprobs
        end = min(chunk.start + chunk.length, sequence.num_prompt - 1)
        if count is None or end <= chunk.start or chunk.num_rows != chunk.length:
            return None
        parts = []
        for first in range(chunk.start, end, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, end)
            logits = self.lane.logits(rows[first - chunk.start : last - chunk.start])
            parts.append(pack_logprobs(logits, sequence.token_ids[first + 1 : last + 1], count))
        return join(parts)


class PendingStep:
    """A plan whose chunks are being processed; `result` draws the tokens."""

    def __init__(
        self,
        runner: Runner,
        plan: StepPlan,
        rows: Tensor,
        started: float,
        encode_s: tuple[float, ...],
        load_s: float,
        draft_s: float,
    ) -> None:
        self._runner, self._plan, self._rows = runner, plan, rows
        self._started, self._encode_s, self._load_s = started, encode_s, load_s
        self._draft_s = draft_s

    @torch.inference_mode()
    def result(self) -> StepResult:
        try:
            chunks = self._runner.finish(self._plan, self._rows)
            self._runner.wait()
        except RuntimeError as error:
            _raise_if_memory_is_short(error)
            raise
        seconds = time.perf_counter() - self._started
        return StepResult(chunks, seconds, self._encode_s, self._load_s, self._draft_s)


def _with_forced(sequence: SequenceState, drawn: Drawn) -> Drawn:
    """Add the tokens that the grammar forces next, if the request allows guesses."""
    if not sequence.sampling.guess or drawn.error is not None or sequence.is_over:
        return drawn
    return msgspec.structs.replace(drawn, forced=sequence.forced())


def _raise_if_memory_is_short(error: RuntimeError) -> None:
    """Raise MemoryError if `error` means that torch ran out of memory."""
    is_short = isinstance(error, torch.OutOfMemoryError)
    # On a CPU, torch raises a plain RuntimeError with this text.
    if is_short or "you tried to allocate" in str(error):
        raise MemoryError(str(error)) from error
