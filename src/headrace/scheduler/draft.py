"""A step while it is being planned: collects what the runner is told; decides nothing."""

from headrace.core.ids import SequenceId
from headrace.core.plan import Begin, Chunk, StepPlan
from headrace.scheduler.sequence import Sequence


class StepDraft:
    """Becomes a StepPlan; each sequence has at most one chunk."""

    def __init__(self) -> None:
        self._begun: list[Begin] = []
        self._chunks: list[Chunk] = []

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def begin(self, sequence: Sequence) -> None:
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

    def add_chunk(self, sequence: Sequence, length: int) -> None:
        """Advance a running sequence; the chunk that ends at its last known token draws."""
        start = sequence.num_planned
        is_final = start + length == sequence.num_known
        draws = is_final and sequence.num_known < sequence.max_total
        num_rows = length if self._wants_all_rows(sequence) else int(draws)
        sequence.advance(length, draws)
        self._chunks.append(
            Chunk(
                sequence.id,
                start,
                length,
                num_rows,
                (sequence.id,) if draws else (),
                sequence.held.block_ids,
                sequence.held.slot_id,
            )
        )

    @staticmethod
    def _wants_all_rows(sequence: Sequence) -> bool:
        if not sequence.wants_prompt_rows:
            return False
        return sequence.num_reported <= sequence.num_planned < sequence.num_prompt - 1

    def build(self, ended: tuple[SequenceId, ...]) -> StepPlan:
        return StepPlan(tuple(self._begun), tuple(self._chunks), ended)
