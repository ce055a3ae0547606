"""How the prompts of a request were computed, made of what the engine said of it."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.messages import Ready
from headrace.streams.events import Ingestion, Usage
from headrace.streams.record import Record


class ChunkCount(NamedTuple):
    """The chunks that a prompt was taken in, and their tokens."""

    number: int
    smallest: int
    largest: int

    def with_one(self, tokens: int) -> "ChunkCount":
        smallest = min(self.smallest, tokens) if self.number else tokens
        return ChunkCount(self.number + 1, smallest, max(self.largest, tokens))


NO_CHUNKS = ChunkCount(0, 0, 0)


def describe(
    record: Record, ready: Ready | None, usage: Usage, prompts: Sequence[ChunkCount]
) -> Ingestion:
    """The record of a request; `prompts` are the chunks of each of its prompts."""
    computed = [chunks for chunks in prompts if chunks.number]
    number = sum(chunks.number for chunks in computed)
    is_applied = any(chunks.number > 1 for chunks in computed)
    reason = f"Prompt computed in {number} chunks." if is_applied else "Prompt fits in one chunk."
    return Ingestion(
        strategy=ready.lane if ready else None,
        eligible=ready is not None,
        applied=is_applied,
        reason=reason if ready else "No ingestion lane matched.",
        boundary=("whole" if ready.is_whole else "step") if ready else "",
        mask=ready.facts.mask if ready else "",
        memory=ready.facts.memory if ready else None,
        encoder=None,  # not told yet, also where one ran
        tokenization=record.tokenization,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        chunks=number,
        chunk_tokens=(min(c.smallest for c in computed), max(c.largest for c in computed))
        if computed
        else None,
    )
