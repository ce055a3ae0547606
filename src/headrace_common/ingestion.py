"""Describes how a prompt is processed: the record of a request, and the plan before a request."""

import msgspec


class Ingestion(msgspec.Struct, frozen=True, kw_only=True):
    """How the prompts of a request were actually processed.

    None means that the value was not measured. The size of a chunk is its number of prompt tokens.
    """

    # The lane (the code path for this kind of model); None if no lane matched.
    strategy: str | None
    # Whether the model can process a prompt in chunks.
    eligible: bool
    # Whether any prompt was processed in more than one chunk.
    applied: bool
    reason: str
    # The origin of the chunk boundaries: "step", "encoder-piece" or "whole"; "" if no lane matched.
    boundary: str
    mask: str
    memory: str | None
    encoder: str | None
    tokenization: str | None
    prompt_tokens: int
    cached_tokens: int
    chunks: int
    chunk_tokens: tuple[int, int] | None  # sizes of the smallest and the largest chunk


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How the loaded model would process a prompt. `llm.plan` returns this struct.

    The scheduler decides the size of each chunk when it runs, from the time limits and the other
    requests. Therefore the plan states the least number of chunks.
    """

    lane: str
    boundary: str  # the origin of the chunk boundaries: "step", "encoder-piece" or "whole"
    prompt_tokens: int
    fits: bool  # whether the context has room for the prompt and one token of an answer
    min_chunks: int
    # Largest number of tokens in a chunk; None if the prompt is not cut by tokens.
    max_chunk_tokens: int | None
    memory: str  # "blocks" or "slot"
    mask: str
    encoder: str | None
    tokenization: str
    why: str  # the reasons for the chunks and for the kind of memory
