"""Packed log probabilities as the entries of an event."""

from array import array

from headrace.core.sampling import Logprobs
from headrace.streams.events import TokenLogprob
from headrace.text.tokenizer import Tokenizer


def token_logprobs(packed: Logprobs, tokenizer: Tokenizer) -> list[TokenLogprob]:
    """One entry per row: the token itself, with the likeliest ones in its place below it."""
    token_ids, values = array("i", packed.ids), array("f", packed.values)
    entries = []
    for row in range(0, len(token_ids), packed.width):
        first, *top = (
            _entry(token_ids[i], values[i], tokenizer) for i in range(row, row + packed.width)
        )
        entries.append(
            TokenLogprob(first.token_id, first.token, first.bytes, first.logprob, tuple(top))
        )
    return entries


def unconditioned(token_id: int, tokenizer: Tokenizer) -> TokenLogprob:
    """The entry of a token that nothing precedes."""
    return _entry(token_id, None, tokenizer)


def _entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> TokenLogprob:
    return TokenLogprob(
        token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprob
    )
