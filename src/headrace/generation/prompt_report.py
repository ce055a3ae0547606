"""How the prompts of a request were computed, made of what the engine said of it."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.streams.events import Ingestion, Usage
from headrace.streams.record import Record
from headrace_common.messages import LaneFacts, Ready


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
    facts = ready.facts if ready else LaneFacts(mask="")
    is_source = ready is not None and ready.source is not None
    is_cut = is_source and facts.encoder == "pieces"
    boundary = "encoder-piece" if is_cut else "whole" if is_source else "step"
    return Ingestion(
        strategy=ready.lane if ready else None,
        eligible=ready is not None and (is_cut or not is_source),
        applied=is_applied,
        reason=_reason(boundary, number, is_applied) if ready else "No ingestion lane matched.",
        boundary=boundary if ready else "",
        mask=facts.mask,
        memory=facts.memory if ready else None,
        encoder=facts.encoder if is_source or record.images else None,
        tokenization=record.tokenization,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        chunks=number,
        chunk_tokens=(min(c.smallest for c in computed), max(c.largest for c in computed))
        if computed
        else None,
    )


def _reason(boundary: str, number: int, is_applied: bool) -> str:
    if boundary == "whole":
        return "This encoder cannot be cut; it ran as one step."
    if boundary == "encoder-piece":
        return f"Source encoded in {f'{number} pieces' if is_applied else 'one piece'}."
    return f"Prompt computed in {number} chunks." if is_applied else "Prompt fits in one chunk."
