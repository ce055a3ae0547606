"""Runs steps of a made-up sequence before the first request, to compile and time the kernels."""

import time
from array import array
from collections.abc import Iterator

import msgspec

from headrace_common.ids import SequenceId, SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import (
    DRAFTED,
    NO_SLOT,
    Begin,
    Chunk,
    EncodeChunk,
    EncoderInput,
    EncoderPiece,
    PromptInputs,
    StepPlan,
)
from headrace_common.sampling import Pooling, Sampling
from headrace_engine.runner.runner import Runner

_TRIALS = ((4, 1), (16, 1), (64, 8, 1))
"""The chunk lengths of each trial sequence.

The prompt chunks have four different sizes, so that the trials use every kernel.
"""
# For each trial of a draft model: the length of the context, and how many tokens are processed
# and chosen. The context is not processed, because the time does not depend on the cache's values.
_DRAFTS = ((0, 1, 1), (0, 1, 4), (0, 2, 8), (0, 64, 1), (448, 64, 1), (448, 1, 4))
_NUM_DRAFT_ROUNDS = 3
_NUM_ROUNDS = 4
_MAX_TIMING_S = 4.0
# The number of source tokens of an encoder-decoder model in these trials.
_SOURCE = 16
_SOURCES = (16, 48, 144)
_ID = SequenceId(-1)

Timed = tuple[tuple[int, int], float]
"""The number of tokens processed earlier, the number of new tokens, and the seconds of the step."""


def one_round(runner: Runner, layout: MemoryLayout) -> Iterator[Timed]:
    for lengths in _TRIALS:
        if sum(lengths) < layout.max_positions:
            whole = (sum(lengths),) if runner.lane.traits.is_whole else lengths
            yield from _trial(runner, layout, whole)


def timed_steps(runner: Runner, layout: MemoryLayout) -> Iterator[Timed]:
    """Run and time steps on a warm runner, the shortest first; stop early if the model is slow.

    A chunk of one token is a decode chunk.
    """
    end = time.monotonic() + _MAX_TIMING_S
    for _ in range(_NUM_ROUNDS):
        for timed in one_round(runner, layout):
            yield timed
            if time.monotonic() > end:
                return


def _trial(runner: Runner, layout: MemoryLayout, lengths: tuple[int, ...]) -> Iterator[Timed]:
    total = sum(lengths)
    blocks = array("i", range(layout.blocks_for(total)))
    slot = SlotId(0) if layout.num_slots else NO_SLOT
    ids = array("i", [0] * total)
    draws_any = "generate" in runner.lane.traits.tasks
    pooling = None if draws_any else Pooling(runner.head.modes)
    works = _encoder_inputs(runner, _SOURCE)
    sampling = Sampling(temperature=0, ignore_eos=True, pooling=pooling)
    begin = Begin(_ID, ids, total, 0, sampling, works)
    runner.launch(StepPlan(begun=(begin,))).result()
    start = 0
    try:
        for number, work in enumerate(works.works):
            encoded = EncodeChunk(_ID, number, 0, work.num_units, slot)
            runner.launch(StepPlan(encoded=(encoded,))).result()
        for length in lengths:
            is_last = start + length == total
            draws = (_ID,) if is_last and draws_any else ()
            chunk = Chunk(_ID, start, length, int(is_last), draws, blocks, slot)
            if length > 1 and runner.drafter is not None:
                end = start + length
                chunk = msgspec.structs.replace(chunk, draft_start=start, draft_end=end)
            yield (start, length), runner.launch(StepPlan(chunks=(chunk,))).result().seconds
            start += length
    finally:
        runner.launch(StepPlan(ended=(_ID,))).result()


def timed_drafts(runner: Runner, layout: MemoryLayout) -> Iterator[tuple[int, int, int, float]]:
    """Time how long the draft model takes to process some tokens and to choose a guess.

    Yields the context, the numbers of processed and chosen tokens, and the seconds. The first times
    are not yielded, because they include warming up.
    """
    end = time.monotonic() + _MAX_TIMING_S
    blocks = array("i", range(layout.blocks_for(layout.max_positions)))
    slot = SlotId(0) if layout.num_slots else NO_SLOT
    sampling = Sampling(temperature=0, ignore_eos=True)
    for is_warm in range(_NUM_DRAFT_ROUNDS):
        for context, num_read, num_chosen in _DRAFTS:
            num_known = context + num_read
            if num_known + num_chosen >= layout.max_positions:
                continue
            chunk = Chunk(
                *(_ID, num_known - 1, 1 + num_chosen, 1 + num_chosen, (_ID,), blocks, slot),
                guess=(DRAFTED,) * num_chosen,
                draft_start=context,
                draft_end=num_known,
            )
            begin = Begin(_ID, array("i", [0] * num_known), num_known, 0, sampling)
            result = runner.launch(StepPlan(begun=(begin,), chunks=(chunk,))).result()
            runner.launch(StepPlan(ended=(_ID,))).result()
            if is_warm:
                yield context, num_read, num_chosen, result.draft_seconds
            if time.monotonic() > end:
                return


def timed_encoding(
    runner: Runner, layout: MemoryLayout
) -> Iterator[tuple[EncoderInput, EncoderPiece, float]]:
    """Run and time pieces of the encoder, if prompts are sources for an encoder.

    Yields the encoding, the piece and the piece's seconds. Times of the first source are not
    yielded, because that source only warms up the kernels.
    """
    end = time.monotonic() + _MAX_TIMING_S
    for is_warm, size in enumerate((_SOURCE, *_SOURCES)):
        works = _encoder_inputs(runner, min(size, layout.max_positions))
        for number, work in enumerate(works.works):
            start_ids = array("i", [0])
            begin = Begin(_ID, start_ids, 1, 0, Sampling(), works)
            runner.launch(StepPlan(begun=(begin,))).result()
            for piece in work.pieces(0, work.num_units):
                if time.monotonic() > end:
                    break
                chunk = EncodeChunk(_ID, number, piece.start, piece.end, SlotId(0))
                result = runner.launch(StepPlan(encoded=(chunk,))).result()
                if is_warm:
                    yield work, piece, sum(result.encode_seconds)
            runner.launch(StepPlan(ended=(_ID,))).result()


def _encoder_inputs(runner: Runner, size: int) -> PromptInputs:
    spec = runner.lane.traits.source
    if spec is None:
        return PromptInputs()
    return PromptInputs((spec.encoding(size, array("i", [0] * size).tobytes()),))
