"""Represents a step while it is planned, launched and committed; makes no decisions."""

from dataclasses import dataclass, field

import msgspec

from headrace_common.ids import SequenceId, SlotId
from headrace_common.plan import (
    DRAFTED,
    NO_SLOT,
    Begin,
    BlockCopy,
    Chunk,
    EncodeChunk,
    EncoderPiece,
    Load,
    LoadedSegment,
    SlotCopy,
    StepPlan,
)
from headrace_engine.scheduler.cost import StepShape
from headrace_engine.scheduler.sequence import Sequence, by_id


@dataclass(slots=True)
class PlannedStep:
    """Collects the work of one step, which has at most one chunk per sequence.

    The planner reads the fields; only the methods of this class write the fields.
    """

    planned_at: float
    # How many more sequences may start in the step.
    num_starts_left: int
    forward_per_chunk: bool
    # Whether the step is for background sequences.
    is_background: bool = False
    # Whether the step is reserved for one suspect of a failed step.
    is_alone: bool = False
    # Only sequences that are due before this time may start.
    due_before: float | None = None
    # How many waiting sequences lacked blocks.
    num_passed_over: int = 0
    # Whether the step is reserved for an encoder input that cannot be split.
    is_exclusive: bool = False
    # Whether a stream waits for the step.
    is_awaited: bool = False
    # The stall target in seconds; None if there is no target.
    stall_target: float | None = None
    # Seconds for prompt chunks. None if the step has no target or no step was timed yet.
    room: float | None = None
    # Predicted seconds of the step in the runner; 0 if too few steps were timed.
    predicted: float = 0.0
    # Seconds that the watchdog allows the step; a rough guess if too few steps were timed.
    allowed: float = 0.0
    # Why the step is expected to miss the stall target; empty if no miss is expected.
    cause: str = ""
    num_decoding: int = 0
    shape: StepShape = field(default_factory=StepShape)
    # For each snapshot: the sequence, the snapshot's slot, and the token after which to save the
    # state.
    saves: list[tuple[Sequence, SlotId, int]] = field(default_factory=list)
    # The plan for the runner, which `launch` sets.
    plan: StepPlan = field(init=False)
    chunks: list[Chunk] = field(default_factory=list)
    # For each chunk, the sequences that the chunk advances.
    named: list[list[Sequence]] = field(default_factory=list)
    encoded: list[EncodeChunk] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    _begun: list[Begin] = field(default_factory=list)
    _restores: list[SlotCopy] = field(default_factory=list)
    _block_copies: list[BlockCopy] = field(default_factory=list)
    _slot_copies: list[SlotCopy] = field(default_factory=list)

    def is_for(self, sequence: Sequence) -> bool:
        """Return whether the step is for this sequence: both are background, or neither is."""
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
        """Let no further sequence start in the step."""
        self.num_starts_left = 0

    def pass_over(self) -> None:
        """Count a waiting sequence that lacked blocks."""
        self.num_passed_over += 1

    def start_only_before(self, due: float) -> None:
        """Let only sequences that are due before `due` start in the step."""
        self.due_before = due

    def open(self, room: float | None, is_awaited: bool, stall_target: float | None) -> None:
        """Set the seconds for prompt chunks, whether a stream waits, and the stall target."""
        self.room, self.is_awaited, self.stall_target = room, is_awaited, stall_target

    def expect(self, predicted: float, allowed: float) -> None:
        """Set the step's predicted seconds, and the seconds that the watchdog allows."""
        self.predicted, self.allowed = predicted, allowed

    def set_cause(self, cause: str) -> None:
        """Set why the step is expected to miss the stall target; empty if no miss is expected."""
        self.cause = cause

    def begin(self, sequence: Sequence, restore: SlotCopy | None = None) -> None:
        """Add a sequence that starts in this step; `restore` copies its state from a snapshot."""
        self.num_starts_left -= 1
        token_ids, sampling = sequence.token_ids[:], sequence.sampling
        self._begun.append(
            Begin(
                sequence.id,
                token_ids,
                sequence.num_prompt,
                sequence.choice,
                sampling,
                sequence.inputs,
                sequence.state,
            )
        )
        if restore is not None:
            self._restores.append(restore)

    def copy(self, block_copy: BlockCopy | None, slot_copy: SlotCopy | None) -> None:
        """Copy memory from a leader to a sibling after the forward pass."""
        if block_copy is not None:
            self._block_copies.append(block_copy)
        if slot_copy is not None:
            self._slot_copies.append(slot_copy)

    def save(self, sequence: Sequence, copy: SlotCopy) -> None:
        """Copy the sequence's recurrent state to a snapshot after the sequence's chunk."""
        self._slot_copies.append(copy)
        self.saves.append((sequence, copy.target, sequence.num_planned))

    def add_decode_chunks(self, sequences: list[Sequence]) -> None:
        """Advance each sequence by one token, before any other chunk is added."""
        if not sequences:
            return
        self.num_decoding = len(sequences)
        num_context = 0
        for sequence in sequences:
            num_context += sequence.num_planned
        self.shape.decode(self.num_decoding, num_context, self.forward_per_chunk)
        for sequence in sequences:
            self._add(sequence, 1, [sequence])
            if sequence.num_to_recompute:
                self._recompute(sequence)

    def _recompute(self, sequence: Sequence) -> None:
        """Make the last chunk start earlier, where a wrong guess has reset the state."""
        num_to_recompute = sequence.take_num_to_recompute()
        chunk, lease = self.chunks[-1], sequence.held
        start, length = chunk.start - num_to_recompute, chunk.length + num_to_recompute
        self.chunks[-1] = msgspec.structs.replace(chunk, start=start, length=length)
        self._restores.append(SlotCopy(lease.kept_slot_id, lease.slot_id))
        self.shape.go_back(start, num_to_recompute)

    def guess(self, index: int, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Append guessed tokens to the sequence's decode chunk, which is chunk number `index`."""
        chunk, lease, size = self.chunks[index], sequence.held, len(token_ids)
        assert chunk.sequence_id == sequence.id and not chunk.guess
        is_drafted = token_ids[0] == DRAFTED
        if is_drafted:
            end = chunk.start + chunk.length
            self.shape.draft(sequence.num_draft_read, end - sequence.num_draft_read, size)
            chunk = self._read_by_draft(chunk, [sequence], end)
        # Keep a copy of the state in case a guess is wrong. A chunk with several known tokens
        # starts from an earlier copy, which still exists.
        if chunk.slot_id != NO_SLOT and chunk.length == 1:
            self._restores.append(SlotCopy(lease.slot_id, lease.kept_slot_id))
        self.chunks[index] = msgspec.structs.replace(
            chunk, length=chunk.length + size, num_rows=1 + size, guess=token_ids
        )
        sequence.plan_guess(size, is_drafted)
        for length in range(chunk.length, chunk.length + size):
            self.shape.extend(chunk.start, length)

    def add_prompt_chunk(self, sequence: Sequence, length: int, siblings: list[Sequence]) -> None:
        """Advance a prompt; `siblings` also draw from the logits of the chunk's last token."""
        context = sequence.num_planned
        self._add(sequence, length, [sequence, *siblings])
        self.shape.add(context, length, True, self.forward_per_chunk)

    def read_prompt_by_draft(self, max_positions: int) -> None:
        """Let the draft model process the last prompt chunk too, up to token `max_positions`.

        Does nothing if tokens before the chunk are missing in the draft model's cache.
        """
        chunk, named = self.chunks[-1], self.named[-1]
        end = min(chunk.start + chunk.length, max_positions)
        if named[0].num_draft_read == chunk.start < end:
            self.chunks[-1] = self._read_by_draft(chunk, named, end)

    def catch_up_by_draft(self, index: int, sequence: Sequence, end: int) -> None:
        """Let the draft model process earlier tokens of a decoding sequence, without a guess."""
        self.shape.draft(sequence.num_draft_read, end - sequence.num_draft_read, 0)
        self.chunks[index] = self._read_by_draft(self.chunks[index], [sequence], end)

    def _read_by_draft(self, chunk: Chunk, named: list[Sequence], end: int) -> Chunk:
        start = named[0].num_draft_read
        for sequence in named:
            sequence.read_draft(end)
        return msgspec.structs.replace(chunk, draft_start=start, draft_end=end)

    def add_encode_chunk(self, sequence: Sequence, number: int, piece: EncoderPiece) -> None:
        """Encode a piece of the sequence's input `number`."""
        work, slot_id = sequence.inputs.works[number], sequence.held.slot_id
        sequence.encode(piece.end - piece.start)
        self.encoded.append(EncodeChunk(sequence.id, number, piece.start, piece.end, slot_id))
        self.shape.encode(piece.stage.kind, piece.num_rows, work.size)
        self.is_exclusive = work.is_whole

    def load(self, sequence: Sequence, end: int, segments: list[LoadedSegment]) -> None:
        """Advance a sequence to token `end` by loading blocks instead of processing tokens."""
        start, lease = sequence.num_planned, sequence.held
        sequence.skip_to(end)
        self.loads.append(Load(sequence.id, start, end, tuple(segments), lease.slot_id))

    def _add(self, sequence: Sequence, length: int, drawing: list[Sequence]) -> None:
        """Add a chunk, which draws the next token if it ends at the last known token.

        No token is drawn if the sequence already has its maximum length.
        """
        start, lease = sequence.num_planned, sequence.lease
        assert lease is not None
        end = start + length
        num_known = len(sequence.token_ids) + sequence.num_pending
        draws = end == num_known and end < sequence.max_total
        num_rows = int(draws)
        if (
            sequence.num_reported <= start < sequence.num_prompt - 1
            and sequence.wants_prompt_logprobs
        ):
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
        """Return the plan for the runner, which can forget the sequences in `ended` first."""
        worked_on = [chunk.sequence_id for chunk in self.chunks]
        if self.loads or self.encoded:
            first = [load.sequence_id for load in self.loads]
            encoded = dict.fromkeys(chunk.sequence_id for chunk in self.encoded)
            worked_on = [*first, *encoded, *worked_on]
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
