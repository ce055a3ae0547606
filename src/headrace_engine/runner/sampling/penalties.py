"""Penalties for tokens that have occurred: repetition, frequency and presence."""

import numpy as np
from numpy.typing import NDArray

from headrace_engine.runner.sampling.logprobs import Floats
from headrace_engine.runner.sampling.occurrences import Occurrences
from headrace_engine.runner.sampling.state import SequenceState


def penalize(row: Floats, known: SequenceState) -> None:
    """Lower the logits of tokens among the sequence's last `repeat_last_n`, in place.

    The repetition penalty counts the prompt's tokens too, the others only tokens that were drawn.
    """
    s = known.sampling
    if s.repetition_penalty != 1:
        seen, _ = _counted(known, known.seen, 0)
        row[seen] = _scaled(row[seen], np.float32(s.repetition_penalty))
    if s.frequency_penalty or s.presence_penalty:
        drawn, counts = _counted(known, known.drawn, known.num_prompt)
        penalties = s.frequency_penalty * counts + s.presence_penalty
        row[drawn] -= penalties.astype(np.float32)


def _counted(
    known: SequenceState, counted: Occurrences, start: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct tokens from number `start` on that are in the window, and their counts."""
    first = len(known.token_ids) - known.sampling.repeat_last_n
    if known.sampling.repeat_last_n >= 0 and first > start:
        ids, counts = np.unique(np.array(known.token_ids[first:]), return_counts=True)
        return ids.astype(np.int64), counts
    counted.take(known.token_ids)
    return counted.token_ids, counted.counts


def _scaled(logits: Floats, penalty: np.float32) -> Floats:
    """Divide positive logits by the penalty and multiply the others, within the float32 range.

    A penalty may be as small as floats go, and as a float32 it may be 0.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.minimum(scaled, np.finfo(np.float32).max)
