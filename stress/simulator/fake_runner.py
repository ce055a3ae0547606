"""A runner without a model: it remembers which token and salt each position of memory contains.

Before a chunk, the runner compares the sequence's memory with the sequence's tokens. This finds
stale blocks, missing copies, and tokens that count as cached although they were never computed.
"""

from array import array
from typing import cast

import msgspec

from headrace_common.layout import MemoryLayout
from headrace_common.plan import (
    NO_SLOT,
    Begin,
    Chunk,
    ChunkResult,
    Drawn,
    EncodeChunk,
    Load,
    StepPlan,
    StepResult,
)
from headrace_common.sampling import Logprobs, Sampling
from headrace_engine.prefixes.assembly import SegmentToSave
from stress.simulator.fake_disk import FakeNumbers

LOAD_S = 1e-4
VOCABULARY = 40
# The maximum number of blocks for which a table is checked completely. Only both ends of a longer
# table are checked.
MAX_READ_BACK = 40


def token_at(sampling: Sampling, choice: int, index: int) -> int:
    """Return the `index`-th token of a choice, which depends only on the request."""
    number = hash((sampling.seed, choice, index))
    return 2 if number % 23 == 0 else 3 + number % VOCABULARY


class Remembered:
    """A sequence as the runner keeps it, with its own copy of the tokens."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.tokens = begin.token_ids
        # How many tokens the draft model has read; -1 before the first chunk.
        self.num_draft_read = -1
        # How many units of each input are encoded.
        self.num_units = [0] * len(begin.inputs.works)
        # An image changes what memory contains at the image's tokens, so these tokens are made
        # different.
        for work in begin.inputs.works:
            for index in range(work.start, min(work.end, begin.num_prompt)):
                self.tokens[index] += 1000 * (1 + sum(work.mark))


class FakeRunner:
    def __init__(self, layout: MemoryLayout, salts: dict[int, str]) -> None:
        self._layout = layout
        self._salts = salts
        self._blocks: dict[int, tuple[array[int], str]] = {}
        # All tokens that were fed into the state of a slot.
        self._slots: dict[int, array[int]] = {}
        self._slot_salts: dict[int, str] = {}
        self._sequences: dict[int, Remembered] = {}

    def execute(
        self, plan: StepPlan, seconds: tuple[float, tuple[float, ...]], row_errors: dict[int, int]
    ) -> StepResult:
        """Executes a step. `seconds` are the times for computing and for encoding."""
        for sequence_id in plan.ended:
            self._sequences.pop(sequence_id, None)
        for begin in plan.begun:
            assert begin.sequence_id not in self._sequences
            self._sequences[begin.sequence_id] = Remembered(begin)
        for copy in plan.restores:
            self._copy_slot(copy.source, copy.target)
        for load in plan.loads:
            self._load(load)
        for encoded in plan.encoded:
            self._encode(encoded)
        chunks = [self._draft(chunk) for chunk in plan.chunks]
        for chunk in chunks:
            self._compute(chunk)
        results = [self._result(chunk, row_errors) for chunk in chunks]
        for block_copy in plan.block_copies:
            tokens, salt = self._blocks[block_copy.source]
            self._blocks[block_copy.target] = (tokens[:], salt)
        for copy in plan.slot_copies:
            self._copy_slot(copy.source, copy.target)
        load_s = LOAD_S * sum(len(load.segments) for load in plan.loads)
        computing_s, encode_s = seconds
        total_s = computing_s + sum(encode_s) + load_s
        return StepResult(tuple(results), total_s, encode_s, load_s)

    def remembered(self, sequence_id: int) -> Remembered:
        return self._sequences[sequence_id]

    def copy_out(self, kept: SegmentToSave) -> FakeNumbers:
        """Return a copy of a segment's blocks, and of the state after them."""
        blocks = [(self._blocks[i][0][:], self._blocks[i][1]) for i in kept.block_ids]
        state = None
        if kept.slot_id is not None:
            state = self._slots[kept.slot_id][:], self._slot_salts[kept.slot_id]
        return FakeNumbers(blocks, state)

    def _draft(self, chunk: Chunk) -> Chunk:
        """Act as the draft model: read tokens, and choose a guess with some wrong tokens."""
        remembered = self._sequences[chunk.sequence_id]
        if remembered.num_draft_read < 0:
            remembered.num_draft_read = chunk.start
        assert chunk.draft_end <= len(remembered.tokens), "the draft model reads unknown tokens"
        if chunk.draft_end > chunk.draft_start:
            assert chunk.draft_start <= remembered.num_draft_read, (
                "tokens are missing in the draft model's cache"
            )
            remembered.num_draft_read = chunk.draft_end
        for sibling in chunk.draws:
            self._sequences[sibling].num_draft_read = remembered.num_draft_read
        if not chunk.is_drafted:
            return chunk
        begin, index = remembered.begin, len(remembered.tokens) - remembered.begin.num_prompt
        chosen = []
        for number in range(index, index + len(chunk.guess)):
            is_right = hash((chunk.sequence_id, number)) % 4 > 0
            token_id = token_at(begin.sampling, begin.choice, number)
            chosen.append(token_id if is_right else token_id + 1)
        return msgspec.structs.replace(chunk, guess=tuple(chosen))

    def _load(self, load: Load) -> None:
        remembered = self._sequences[load.sequence_id]
        if remembered.num_draft_read in (-1, load.start):
            remembered.num_draft_read = load.end
        for segment in load.segments:
            numbers = cast(FakeNumbers, segment.numbers)
            assert len(numbers.blocks) == segment.num_blocks
            loaded = numbers.blocks[segment.skip :]
            for block_id, (tokens, salt) in zip(segment.block_ids, loaded, strict=True):
                self._blocks[block_id] = tokens[:], salt
            if numbers.state is not None:
                state, salt = numbers.state
                self._slots[load.slot_id], self._slot_salts[load.slot_id] = state[:], salt

    def _encode(self, chunk: EncodeChunk) -> None:
        remembered = self._sequences[chunk.sequence_id]
        assert chunk.start == remembered.num_units[chunk.work] < chunk.end, (
            "encoder units are out of order"
        )
        assert chunk.end <= remembered.begin.inputs.works[chunk.work].num_units
        remembered.num_units[chunk.work] = chunk.end

    def _check_encoded(self, chunk: Chunk) -> None:
        remembered = self._sequences[chunk.sequence_id]
        end = chunk.start + chunk.length
        for work, done in zip(remembered.begin.inputs.works, remembered.num_units, strict=True):
            is_needed = work.start < end and chunk.start < work.end
            assert not is_needed or done == work.num_units, (
                "tokens were computed before their encoder input"
            )
        for sibling in chunk.draws:
            self._sequences[sibling].num_units = remembered.num_units[:]

    def _copy_slot(self, source: int, target: int) -> None:
        self._slots[target] = self._slots[source][:]
        self._slot_salts[target] = self._slot_salts[source]

    def _compute(self, chunk: Chunk) -> None:
        remembered = self._sequences[chunk.sequence_id]
        salt = self._salts[chunk.sequence_id]
        end = chunk.start + chunk.length
        assert chunk.adapter == salt.partition("\n")[0], "computed with another adapter"
        self._check_encoded(chunk)
        tokens = remembered.tokens
        assert chunk.num_known > 0, "the chunk contains only speculative tokens"
        assert chunk.start + chunk.num_known <= len(tokens), (
            "the chunk contains tokens that the runner does not have"
        )
        if chunk.guess:
            assert end - len(chunk.guess) == len(tokens), (
                "a speculative token does not follow the last token"
            )
            tokens = tokens + array("i", chunk.guess)
        if self._layout.num_blocks:
            self._read_back(chunk, tokens, salt)
            self._write(chunk, tokens, salt)
        if chunk.slot_id != NO_SLOT:
            self._advance_state(chunk, tokens, salt)

    def _read_back(self, chunk: Chunk, tokens: "array[int]", salt: str) -> None:
        size = self._layout.block_size
        num_blocks = -(-chunk.start // size)
        indices = [*range(num_blocks)]
        if num_blocks > MAX_READ_BACK:
            indices = [0, 1, *range(num_blocks - 3, num_blocks)]
        for index in indices:
            expected = tokens[index * size : min((index + 1) * size, chunk.start)]
            block_id = chunk.block_ids[index]
            found, found_salt = self._blocks.get(block_id, (array("i"), ""))
            is_right = found[: len(expected)] == expected and found_salt == salt
            assert is_right, f"block {block_id} does not hold sequence {chunk.sequence_id}"

    def _write(self, chunk: Chunk, tokens: "array[int]", salt: str) -> None:
        size = self._layout.block_size
        end = chunk.start + chunk.length
        for index in range(chunk.start // size, -(-end // size)):
            first = max(index * size, chunk.start)
            block_id = chunk.block_ids[index]
            before = (
                self._blocks[block_id][0][: first - index * size] if first % size else array("i")
            )
            written = before + tokens[first : min((index + 1) * size, end)]
            self._blocks[block_id] = (written, salt)

    def _advance_state(self, chunk: Chunk, tokens: "array[int]", salt: str) -> None:
        if chunk.start == 0:
            self._slots[chunk.slot_id] = array("i")
            self._slot_salts[chunk.slot_id] = salt
        state = self._slots.get(chunk.slot_id, array("i"))
        assert state == tokens[: chunk.start], f"slot {chunk.slot_id} holds another state"
        assert self._slot_salts[chunk.slot_id] == salt
        state.extend(tokens[chunk.start : chunk.start + chunk.length])

    def _result(self, chunk: Chunk, row_errors: dict[int, int]) -> ChunkResult:
        assert chunk.num_rows or not chunk.draws, (
            "the chunk returns no row of logits to sample from"
        )
        drawn = tuple(self._draw(sequence_id, row_errors) for sequence_id in chunk.draws)
        for token_id in chunk.guess:
            (sequence_id,), (one,) = chunk.draws, drawn
            if one.error or one.token_ids[-1] != token_id or self._is_over(sequence_id):
                break
            more = self._draw(sequence_id, row_errors)
            drawn = (Drawn(one.token_ids + more.token_ids, error=more.error),)
        if chunk.guess and chunk.draft_end == chunk.start + chunk.num_known:
            num_right = max(0, len(drawn[0].token_ids) - 1)
            # The draft model has not read the last token that it chose.
            remembered = self._sequences[chunk.sequence_id]
            remembered.num_draft_read += min(num_right, len(chunk.guess) - 1)
        return ChunkResult(drawn, self._prompt_rows(chunk))

    def _is_over(self, sequence_id: int) -> bool:
        remembered = self._sequences[sequence_id]
        index = len(remembered.tokens) - remembered.begin.num_prompt
        return remembered.begin.sampling.ends_with(remembered.tokens[-1], index)

    def _draw(self, sequence_id: int, row_errors: dict[int, int]) -> Drawn:
        remembered = self._sequences[sequence_id]
        index = len(remembered.tokens) - remembered.begin.num_prompt
        token_id = token_at(remembered.begin.sampling, remembered.begin.choice, index)
        remembered.tokens.append(token_id)
        if row_errors.get(sequence_id, -1) == index:
            return Drawn(error="not a number")
        return Drawn((token_id,))

    def _prompt_rows(self, chunk: Chunk) -> Logprobs | None:
        begin = self._sequences[chunk.sequence_id].begin
        is_prompt = chunk.start < begin.num_prompt - 1
        if begin.sampling.num_prompt_logprobs is None or not is_prompt:
            return None
        if chunk.num_rows != chunk.length:
            return None
        first, last = chunk.start + 1, min(chunk.start + chunk.length + 1, begin.num_prompt)
        return Logprobs(1, begin.token_ids[first:last].tobytes(), b"")
