"""A step while it is being planned: collects what the runner is told; decides nothing."""

from headrace.core.ids import SequenceId, SlotId
from headrace.core.plan import Begin, BlockCopy, Chunk, SlotCopy, StepPlan
from headrace.scheduler.cost import StepShape
from headrace.scheduler.sequence import Sequence


class StepDraft:
    """Becomes a StepPlan; each sequence has at most one chunk."""

    def __init__(self, forward_per_chunk: bool) -> None:
        self.shape = StepShape()
        self.num_decoding = 0
        self.is_awaited = False  # whether a stream waits for this step
        self.room: float | None = None  # seconds for prompt chunks
        self.cause = ""  # why the step may be predicted to miss its target
        self.saves: list[tuple[Sequence, SlotId, int]] = []  # snapshot slot, tokens before it
        self._forward_per_chunk = forward_per_chunk
        self._begun: list[Begin] = []
        self._chunks: list[Chunk] = []
        self._restores: list[SlotCopy] = []
        self._block_copies: list[BlockCopy] = []
        self._slot_copies: list[SlotCopy] = []

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    @property
    def has_prompt_work(self) -> bool:
        return self.shape.num_prompt_tokens > 0

    def begin(self, sequence: Sequence, restore: SlotCopy | None = None) -> None:
        """Announce a sequence that starts in this step."""
        self._begun.append(
            Begin(
                sequence.id,
                sequence.token_ids[:],
                sequence.num_prompt,
                sequence.choice,
                sequence.sampling,
            )
        )
        if restore is not None:
            self._restores.append(restore)

    def copy(self, block_copy: BlockCopy | None, slot_copy: SlotCopy | None) -> None:
        """Have a sibling's memory made from its leader's after the forward."""
        if block_copy is not None:
            self._block_copies.append(block_copy)
        if slot_copy is not None:
            self._slot_copies.append(slot_copy)

    def save(self, sequence: Sequence, copy: SlotCopy) -> None:
        """Have the state after the sequence's chunk kept."""
        self._slot_copies.append(copy)
        self.saves.append((sequence, copy.target, sequence.num_planned))

    def add_decode_chunk(self, sequence: Sequence) -> None:
        self.num_decoding += 1
        self._add(sequence, 1, [sequence])
        self.shape.add(sequence.num_planned - 1, 1, False, self._forward_per_chunk)

    def add_prompt_chunk(self, sequence: Sequence, length: int, siblings: list[Sequence]) -> None:
        """Advance a prompt; `siblings` draw from its last row too."""
        context = sequence.num_planned
        self._add(sequence, length, [sequence, *siblings])
        self.shape.add(context, length, True, self._forward_per_chunk)

    def _add(self, sequence: Sequence, length: int, drawing: list[Sequence]) -> None:
        """The chunk that ends at the last known token draws, if there is anything to draw."""
        start, lease = sequence.num_planned, sequence.held
        end = start + length
        draws = end == sequence.num_known and end < sequence.max_total
        num_rows = int(draws)
        if sequence.num_reported <= start < sequence.num_prompt - 1 and sequence.wants_prompt_rows:
            num_rows = length
        for named in drawing if draws else (sequence,):
            named.advance(end, draws)
        ids = tuple([drawn.id for drawn in drawing]) if draws else ()
        self._chunks.append(
            Chunk(sequence.id, start, length, num_rows, ids, lease.block_ids, lease.slot_id)
        )

    def build(self, ended: tuple[SequenceId, ...]) -> StepPlan:
        return StepPlan(
            begun=tuple(self._begun),
            chunks=tuple(self._chunks),
            ended=ended,
            block_copies=tuple(self._block_copies),
            slot_copies=tuple(self._slot_copies),
            restores=tuple(self._restores),
        )
