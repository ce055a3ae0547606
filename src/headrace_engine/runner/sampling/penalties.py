"""Applies repetition, frequency and presence penalties to tokens that have occurred."""

import numpy as np
from numpy.typing import NDArray

from headrace_engine.runner.sampling.logprobs import Floats
from headrace_engine.runner.sampling.occurrences import Occurrences
from headrace_engine.runner.sampling.state import SequenceState


def penalize(row: Floats, sequence: SequenceState) -> None:
    """Lower the logits of tokens among the sequence's last `repeat_last_n` tokens, in place.

    The repetition penalty also counts prompt tokens. The frequency and presence penalties count
    only drawn tokens.
    """
    s = sequence.sampling
    if s.repetition_penalty != 1:
        seen, _ = _counted(sequence, sequence.seen, 0)
        # A prompt can have tokens without a logit, for example placeholders of images.
        seen = seen[: np.searchsorted(seen, len(row))]
        row[seen] = _scaled(row[seen], np.float32(s.repetition_penalty))
    if s.frequency_penalty or s.presence_penalty:
        drawn, counts = _counted(sequence, sequence.drawn, sequence.num_prompt)
        penalties = s.frequency_penalty * counts + s.presence_penalty
        row[drawn] -= penalties.astype(np.float32)


def _counted(
    sequence: SequenceState, counted: Occurrences, start: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct tokens from index `start` on that are in the window, and their counts."""
    first = len(sequence.token_ids) - sequence.sampling.repeat_last_n
    if sequence.sampling.repeat_last_n >= 0 and first > start:
        ids, counts = np.unique(np.array(sequence.token_ids[first:]), return_counts=True)
        return ids.astype(np.int64), counts
    counted.update(sequence.token_ids)
    return counted.token_ids, counted.counts


def _scaled(logits: Floats, penalty: np.float32) -> Floats:
    """Divide positive logits by the penalty, and multiply all others, within the float32 range.

    A tiny penalty can become 0 as a float32.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.minimum(scaled, np.finfo(np.float32).max)
