"""Executes a plan: computes its chunks, draws its tokens; remembers each sequence's tokens."""

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
from headrace_engine.runner.lanes.lane import EncodingLane, Lane
from headrace_engine.runner.pooling import UNIT, PooledRows, VectorHead
from headrace_engine.runner.sampling.logprobs import join, pack_logprobs
from headrace_engine.runner.sampling.sampler import draw, draw_guessed
from headrace_engine.runner.sampling.state import Constraint, SequenceState

_ROWS_AT_ONCE = 64  # rows of prompt logits held at a time: 64 × 150,000 × 4 bytes = 38 MB


def _unconstrained(sampling: Sampling) -> Constraint | None:
    return None


class Runner:
    """Runs plans in the order in which they are launched."""

    def __init__(
        self,
        lane: Lane,
        head: VectorHead = UNIT,
        constrain: Callable[[Sampling], Constraint | None] = _unconstrained,
        tells_forced: bool = False,
    ) -> None:
        """`head` makes vectors; `constrain` returns the constraint of an answer that has one.

        With `tells_forced`, a draw also returns the tokens that its grammar forces next, which
        guesses start with.
        """
        self.lane = lane
        self.head = head
        self._constrain = constrain
        self._tells_forced = tells_forced
        self.forward = lane.forward  # another one while adapters are loaded
        self._known: dict[SequenceId, SequenceState] = {}
        self._inputs: dict[SequenceId, PromptInputs] = {}  # of those that have works

    @functools.cached_property
    def numbers(self) -> BlockBytes | None:
        """The lane's memory as bytes, if it may be kept elsewhere."""
        storage = self.lane.storage
        return None if storage is None else BlockBytes(storage)

    @functools.cached_property
    def adapters(self) -> Adapters:
        """ModelError if the lane takes none."""
        if not self.lane.traits.takes_adapters:
            raise ModelError(
                f"Lane {self.lane.traits.id} takes no adapters; the native lanes do. "
                "`headrace merge` makes a model of base and adapter."
            )
        return Adapters(cast(AdaptableLane, self.lane))

    @torch.inference_mode()
    def read_adapter(self, adapter: Adapter) -> ReadAdapter:
        """May run beside steps; ModelError if it cannot be had."""
        return self.adapters.read(adapter)

    @torch.inference_mode()
    def put_adapter(self, read: ReadAdapter) -> None:
        """Lets chunks name it."""
        self.adapters.put(read)
        self.forward = self.adapters.forward

    def drop_adapter(self, fingerprint: str) -> None:
        """No chunk names it any more."""
        self.adapters.drop(fingerprint)
        if not self.adapters:
            self.forward = self.lane.forward

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "PendingStep":
        """Computes the chunks; MemoryError, here or with the result, if the device is full."""
        began = time.perf_counter()
        for sequence_id in plan.ended:
            self._known.pop(sequence_id, None)
            if self._inputs.pop(sequence_id, None) is not None:
                self._encoding.end(sequence_id)
        for begin in plan.begun:
            self._known[begin.sequence_id] = SequenceState.from_begin(
                begin, self._constrain(begin.sampling), self.head
            )
            if begin.inputs.works:
                self._inputs[begin.sequence_id] = begin.inputs
                self._encoding.begin(begin.sequence_id, begin.inputs)
        encode_s = load_s = 0.0
        rows = torch.empty(0)
        try:
            if plan.restores:
                self.lane.copy((), plan.restores)
            if plan.loads:
                load_s = self._load(plan.loads)
            for encoded in plan.encoded:
                if self._encode(encoded):
                    encode_s += time.perf_counter() - began
            if plan.chunks:
                rows = self._compute(plan.chunks)
            if plan.block_copies or plan.slot_copies:
                self.lane.copy(plan.block_copies, plan.slot_copies)
        except RuntimeError as error:
            _raise_if_memory_is_short(error)
            raise
        return PendingStep(self, plan, rows, began, encode_s, load_s)

    def _load(self, loads: Sequence[Load]) -> float:
        """Returns the seconds that it took."""
        began = time.perf_counter()
        assert self.numbers is not None, "nothing is loaded that was never kept"
        for load in loads:
            slot_id = None if load.slot_id == NO_SLOT else load.slot_id
            for run in load.runs:
                self.numbers.put(run.numbers, run.num_blocks, run.skip, run.block_ids, slot_id)
        return time.perf_counter() - began

    @property
    def _encoding(self) -> EncodingLane:
        return cast(EncodingLane, self.lane)  # no other lane has sequences with works

    def _encode(self, chunk: EncodeChunk) -> bool:
        work = self._inputs[chunk.sequence_id].works[chunk.work]
        return self._encoding.encode(chunk, work)

    def _compute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run the chunks' tokens through the model; return the rows that the chunks ask for."""
        tokens = []
        for chunk in chunks:
            num_known = chunk.length - len(chunk.guess)
            known = self._known[chunk.sequence_id].token_ids
            token_ids = known[chunk.start : chunk.start + num_known]
            assert len(token_ids) == num_known, "a chunk goes past the known tokens"
            token_ids.extend(chunk.guess)
            tokens.append(token_ids)
        return self.forward(chunks, tokens)

    def finish(self, plan: StepPlan, rows: Tensor) -> tuple[ChunkResult, ...]:
        """Draws the tokens of a computed plan and remembers them."""
        if not plan.chunks:
            return ()
        parts = rows.split([chunk.num_rows for chunk in plan.chunks])
        drawn = iter(self._draw(plan.chunks, parts))
        results = []
        for chunk, part in zip(plan.chunks, parts, strict=True):
            known = self._known[chunk.sequence_id]
            if known.pooled is not None:
                results.append(self._pooled(chunk, part, known.pooled))
                continue
            logprobs = None
            if known.sampling.num_prompt_logprobs is not None:
                logprobs = self._prompt_logprobs(chunk, part)
            own = tuple(islice(drawn, len(chunk.draws)))
            results.append(ChunkResult(drawn=own, prompt_logprobs=logprobs))
        return tuple(results)

    def _pooled(self, chunk: Chunk, rows: Tensor, pooled: PooledRows) -> ChunkResult:
        pooled.add(rows, self.lane.logits)
        if chunk.start + chunk.length < self._known[chunk.sequence_id].num_prompt:
            return ChunkResult()
        vector = pooled.vector()
        error = None if vector else "The model's output for this input is not a number."
        return ChunkResult(vector=vector or b"", error=error)

    def _draw(self, chunks: Sequence[Chunk], parts: Sequence[Tensor]) -> list[Drawn]:
        """Draws for each sequence, chunk by chunk; siblings draw from the same row."""
        rows: list[Tensor] = []
        places: list[int] = []  # the number of each sequence's first row
        sequences: list[SequenceState] = []
        guesses: list[tuple[int, ...]] = []
        num_rows = 0
        for chunk, part in zip(chunks, parts, strict=True):
            if not chunk.draws:
                continue
            rows.append(part[len(part) - 1 - len(chunk.guess) :])
            for sequence_id in chunk.draws:
                places.append(num_rows)
                sequences.append(self._known[sequence_id])
                guesses.append(chunk.guess)
            num_rows += 1 + len(chunk.guess)
        if not rows:
            return []
        logits = self.lane.logits(torch.cat(rows))  # [rows, vocab]
        first_rows = logits if places == list(range(num_rows)) else logits[places]
        results = []
        for place, known, drawn, guess in zip(
            places, sequences, draw(first_rows, sequences), guesses, strict=True
        ):
            known.token_ids.extend(drawn.token_ids)
            if guess:
                drawn = draw_guessed(logits[place:], known, drawn, guess)
            if self._tells_forced and known.constraint is not None:
                drawn = _with_forced(known, drawn)
            results.append(drawn)
        return results

    def _prompt_logprobs(self, chunk: Chunk, rows: Tensor) -> Logprobs | None:
        """Rows for the prompt tokens that follow this chunk's, a bounded group at a time."""
        known = self._known[chunk.sequence_id]
        count = known.sampling.num_prompt_logprobs
        end = min(chunk.start + chunk.length, known.num_prompt - 1)
        if count is None or end <= chunk.start or chunk.num_rows != chunk.length:
            return None
        parts = []
        for first in range(chunk.start, end, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, end)
            logits = self.lane.logits(rows[first - chunk.start : last - chunk.start])
            parts.append(pack_logprobs(logits, known.token_ids[first + 1 : last + 1], count))
        return join(parts)


class PendingStep:
    """A launched plan."""

    def __init__(
        self,
        runner: Runner,
        plan: StepPlan,
        rows: Tensor,
        began: float,
        encode_s: float,
        load_s: float,
    ) -> None:
        self._runner, self._plan, self._rows = runner, plan, rows
        self._began, self._encode_s, self._load_s = began, encode_s, load_s

    @torch.inference_mode()
    def result(self) -> StepResult:
        try:
            chunks = self._runner.finish(self._plan, self._rows)
        except RuntimeError as error:
            _raise_if_memory_is_short(error)
            raise
        seconds = time.perf_counter() - self._began
        return StepResult(chunks, seconds, self._encode_s, self._load_s)


def _with_forced(known: SequenceState, drawn: Drawn) -> Drawn:
    """Add the tokens that the grammar forces next, if the request allows guesses."""
    if not known.sampling.guess or drawn.error is not None or known.is_over:
        return drawn
    return msgspec.structs.replace(drawn, forced=known.forced())


def _raise_if_memory_is_short(error: RuntimeError) -> None:
    """Raise MemoryError if torch ran out of memory, which it reports in several ways."""
    is_short = isinstance(error, torch.OutOfMemoryError)
    if is_short or "you tried to allocate" in str(error):  # the CPU's allocator has no type
        raise MemoryError(str(error)) from error
