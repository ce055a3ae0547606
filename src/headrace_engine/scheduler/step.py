"""A step while it is filled, launched and committed; decides nothing."""

from dataclasses import dataclass, field

import msgspec

from headrace_common.ids import SequenceId, SlotId
from headrace_common.plan import (
    NO_SLOT,
    Begin,
    BlockCopy,
    Chunk,
    EncodeChunk,
    Load,
    LoadedRun,
    SlotCopy,
    StepPlan,
)
from headrace_engine.scheduler.cost import StepShape
from headrace_engine.scheduler.sequence import Sequence, by_id


@dataclass(slots=True)
class PlannedStep:
    """A step from its first chunk to its commit; each sequence has at most one chunk in it.

    The planner reads its fields; only its methods write them.
    """

    planned_at: float
    seats: int  # sequences that may still start in it
    forward_per_chunk: bool
    is_background: bool = False  # whether it is for background sequences
    is_alone: bool = False  # whether a suspect has it to itself
    first_due: float | None = None  # only sequences due before it may start
    num_passed_over: int = 0  # waiting sequences that lacked blocks
    is_exclusive: bool = False  # whether an encoder that cannot be cut has it to itself
    is_awaited: bool = False  # whether a stream waits for it
    room: float | None = None  # seconds for prompt chunks; None: no target, or none measured
    predicted: float = 0.0  # seconds in the runner; 0 while unmeasured
    allowed: float = 0.0  # the same for the watch on hangs: a guess is better than nothing
    cause: str = ""  # why it is expected to miss its target
    num_decoding: int = 0
    shape: StepShape = field(default_factory=StepShape)
    saves: list[tuple[Sequence, SlotId, int]] = field(default_factory=list)  # slot, end
    plan: StepPlan = field(init=False)  # from its launch
    chunks: list[Chunk] = field(default_factory=list)
    named: list[list[Sequence]] = field(default_factory=list)  # by each chunk
    encoded: list[EncodeChunk] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    _begun: list[Begin] = field(default_factory=list)
    _restores: list[SlotCopy] = field(default_factory=list)
    _block_copies: list[BlockCopy] = field(default_factory=list)
    _slot_copies: list[SlotCopy] = field(default_factory=list)

    def is_for(self, sequence: Sequence) -> bool:
        """Whether it may work on this one, or the background keeps them apart."""
        return sequence.is_background == self.is_background

    @property
    def has_prompt_work(self) -> bool:
        return self.shape.num_prompt_tokens > 0 or bool(self.encoded)

    @property
    def only_decodes(self) -> bool:
        return self.num_decoding > 0 and not (self.has_prompt_work or self.loads)

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.encoded or self.loads)

    def refuse_starts(self) -> None:
        """No further sequence may start in it."""
        self.seats = 0

    def pass_over(self) -> None:
        """Count a waiting sequence that lacked blocks."""
        self.num_passed_over += 1

    def start_only_before(self, due: float) -> None:
        """Only sequences that are due before it may start."""
        self.first_due = due

    def open(self, room: float | None, is_awaited: bool) -> None:
        """Set the seconds for prompt chunks, and whether a stream waits for the step."""
        self.room, self.is_awaited = room, is_awaited

    def expect(self, predicted: float, allowed: float) -> None:
        """Set the seconds that it should take, and those that the watch on hangs allows it."""
        self.predicted, self.allowed = predicted, allowed

    def blame(self, cause: str) -> None:
        """Set why it is expected to miss its target; empty if it is not."""
        self.cause = cause

    def begin(self, sequence: Sequence, restore: SlotCopy | None = None) -> None:
        """Introduce a sequence that starts in this step."""
        self.seats -= 1
        token_ids, sampling = sequence.token_ids[:], sequence.sampling
        self._begun.append(
            Begin(
                sequence.id,
                token_ids,
                sequence.num_prompt,
                sequence.choice,
                sampling,
                sequence.inputs,
            )
        )
        if restore is not None:
            self._restores.append(restore)

    def copy(self, block_copy: BlockCopy | None, slot_copy: SlotCopy | None) -> None:
        """Copy a leader's memory to its sibling's after the forward."""
        if block_copy is not None:
            self._block_copies.append(block_copy)
        if slot_copy is not None:
            self._slot_copies.append(slot_copy)

    def save(self, sequence: Sequence, copy: SlotCopy) -> None:
        """Keep the sequence's state after its chunk."""
        self._slot_copies.append(copy)
        self.saves.append((sequence, copy.target, sequence.num_planned))

    def add_decode_chunks(self, sequences: list[Sequence]) -> None:
        """Advance each by one token; before any other chunk."""
        if not sequences:
            return
        self.num_decoding = len(sequences)
        num_context = 0
        for sequence in sequences:
            num_context += sequence.num_planned
        self.shape.decode(self.num_decoding, num_context, self.forward_per_chunk)
        for sequence in sequences:
            self._add(sequence, 1, [sequence])
            if sequence.num_again:
                self._take_in_again(sequence)

    def _take_in_again(self, sequence: Sequence) -> None:
        """The last chunk begins where the sequence's state went back to."""
        num_again = sequence.take_in_again()
        chunk, lease = self.chunks[-1], sequence.held
        start, length = chunk.start - num_again, chunk.length + num_again
        self.chunks[-1] = msgspec.structs.replace(chunk, start=start, length=length)
        self._restores.append(SlotCopy(lease.kept_slot_id, lease.slot_id))
        self.shape.go_back(start, num_again)

    def guess(self, place: int, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Let the sequence's decode chunk, the step's number `place`, go on with these tokens."""
        chunk, lease, size = self.chunks[place], sequence.held, len(token_ids)
        assert chunk.sequence_id == sequence.id and not chunk.guess
        if chunk.slot_id != NO_SLOT and chunk.length == 1:  # else it was restored from there
            self._restores.append(SlotCopy(lease.slot_id, lease.kept_slot_id))
        self.chunks[place] = msgspec.structs.replace(
            chunk, length=chunk.length + size, num_rows=1 + size, guess=token_ids
        )
        sequence.plan_guess(size)
        for length in range(chunk.length, chunk.length + size):
            self.shape.extend(chunk.start, length)

    def add_prompt_chunk(self, sequence: Sequence, length: int, siblings: list[Sequence]) -> None:
        """Advance a prompt; `siblings` draw from its last row too."""
        context = sequence.num_planned
        self._add(sequence, length, [sequence, *siblings])
        self.shape.add(context, length, True, self.forward_per_chunk)

    def add_encode_chunk(self, sequence: Sequence, number: int, start: int, num_units: int) -> None:
        """Advance work `number` of a sequence from unit `start` on."""
        work, slot_id = sequence.inputs.works[number], sequence.held.slot_id
        sequence.encode(num_units)
        self.encoded.append(EncodeChunk(sequence.id, number, start, start + num_units, slot_id))
        self.shape.encode(work.size, num_units)
        self.is_exclusive = work.is_whole

    def load(self, sequence: Sequence, end: int, runs: list[LoadedRun]) -> None:
        """Advance a sequence to token `end`, by what was computed before."""
        start, lease = sequence.num_planned, sequence.held
        sequence.skip_to(end)
        self.loads.append(Load(sequence.id, start, end, tuple(runs), lease.slot_id))

    def _add(self, sequence: Sequence, length: int, drawing: list[Sequence]) -> None:
        """The chunk that ends at the last known token draws, if there is anything to draw."""
        start, lease = sequence.num_planned, sequence.lease
        assert lease is not None
        end = start + length
        num_known = len(sequence.token_ids) + sequence.num_pending
        draws = end == num_known and end < sequence.max_total
        num_rows = int(draws)
        if sequence.num_reported <= start < sequence.num_prompt - 1 and sequence.wants_prompt_rows:
            num_rows = length
        pooling = sequence.sampling.pooling
        if pooling is not None:
            num_rows = pooling.num_rows(start, end, sequence.max_total)
        named = drawing if draws else [sequence]
        for advancing in named:
            advancing.advance(end, draws)
        self.named.append(named)
        ids = tuple(map(by_id, drawing)) if draws else ()
        self.chunks.append(
            Chunk(
                sequence.id,
                start,
                length,
                num_rows,
                ids,
                lease.block_ids,
                lease.slot_id,
                pooling.num_first if pooling else 0,
                adapter=sequence.adapter,
            )
        )

    def launch(self, ended: tuple[SequenceId, ...]) -> StepPlan:
        """Makes the plan for the runner, which may forget the sequences in `ended` first."""
        worked_on = [chunk.sequence_id for chunk in self.chunks]
        if self.loads or self.encoded:
            first = [load.sequence_id for load in self.loads]
            worked_on = first + [chunk.sequence_id for chunk in self.encoded] + worked_on
        self.plan = StepPlan(
            begun=tuple(self._begun),
            chunks=tuple(self.chunks),
            ended=ended,
            block_copies=tuple(self._block_copies),
            slot_copies=tuple(self._slot_copies),
            restores=tuple(self._restores),
            encoded=tuple(self.encoded),
            loads=tuple(self.loads),
            worked_on=tuple(worked_on),
            allowed_s=self.allowed,
        )
        return self.plan
