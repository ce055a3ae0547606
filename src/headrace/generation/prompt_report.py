"""Describes how the prompts of a request were processed, from the engine's reports."""

from collections.abc import Sequence

from headrace.generation.wait_news import ChunkCount
from headrace.protocols.prompt_ids import PromptIds
from headrace.streams.events import Usage
from headrace.streams.record import Record
from headrace_common.ingestion import Ingestion, Plan
from headrace_common.messages import LaneFacts, Ready


def describe(
    record: Record, ready: Ready | None, usage: Usage, prompts: Sequence[ChunkCount]
) -> Ingestion:
    """Return the report on a request; `prompts` contains one chunk count per prompt."""
    computed = [chunks for chunks in prompts if chunks.number]
    number = sum(chunks.number for chunks in computed)
    is_applied = any(chunks.number > 1 for chunks in computed)
    facts = ready.facts if ready else LaneFacts(mask="")
    is_source = ready is not None and ready.source is not None
    boundary = _boundary(ready) if ready else ""
    return Ingestion(
        strategy=ready.lane if ready else None,
        eligible=ready is not None and boundary != "whole",
        applied=is_applied,
        reason=_reason(boundary, number, is_applied) if ready else "No ingestion lane matched.",
        boundary=boundary,
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


def plan_of(ready: Ready, prompt: PromptIds) -> Plan:
    """Return how an idle engine would process this prompt, in as few chunks as possible."""
    boundary, num_tokens = _boundary(ready), len(prompt.token_ids)
    is_cut = boundary == "step" and not ready.is_whole
    longest = (ready.max_step_tokens or num_tokens) if is_cut else None
    number = max(1, -(-num_tokens // longest)) if longest else 1
    if ready.is_whole or boundary == "whole":
        why = "This model processes each prompt in one step."
    elif boundary == "encoder-piece":
        units = ready.source.encoding(num_tokens).num_units if ready.source else 1
        why = f"The source is encoded in 1 to {units} pieces."
    else:
        chunks = "fit in one chunk" if number == 1 else f"need at least {number} chunks"
        why = f"{num_tokens} tokens {chunks} of at most {longest} tokens."
    if ready.facts.why:
        why += f" Memory: {ready.facts.why}."
    return Plan(
        lane=ready.lane,
        boundary=boundary,
        prompt_tokens=num_tokens,
        fits=num_tokens < ready.max_model_len or ready.source is not None,
        min_chunks=number,
        max_chunk_tokens=longest,
        memory=ready.facts.memory,
        mask=ready.facts.mask,
        encoder=ready.facts.encoder,
        tokenization=prompt.tokenization,
        why=why,
    )


def _boundary(ready: Ready) -> str:
    if ready.source is None:
        return "step"
    return "encoder-piece" if ready.facts.encoder == "pieces" else "whole"


def _reason(boundary: str, number: int, is_applied: bool) -> str:
    if boundary == "whole":
        return "This encoder cannot run in pieces; it ran as one step."
    if boundary == "encoder-piece":
        return f"Source encoded in {f'{number} pieces' if is_applied else 'one piece'}."
    return f"Prompt processed in {number} chunks." if is_applied else "Prompt fits in one chunk."
