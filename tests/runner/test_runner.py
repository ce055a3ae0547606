"""The runner's own bookkeeping, over a lane whose likeliest token is the last one plus one."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_common.ids import BlockId, SequenceId, SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import (
    Begin,
    BlockCopy,
    Chunk,
    ChunkResult,
    EncoderInput,
    PromptInputs,
    SlotCopy,
    StepPlan,
)
from headrace_common.sampling import Sampling
from headrace_engine.runner.lanes.lane import LaneTraits
from headrace_engine.runner.runner import Runner

VOCAB = 500
A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


class CountingLane:
    """Token 400 gives rows that are not a number."""

    traits = LaneTraits("counting")
    device, dtype = torch.device("cpu"), torch.float32
    num_parameters = weight_bytes = 0

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.head_rows: list[int] = []
        self.done: list[Any] = []

    def layout(self, *_: int) -> MemoryLayout:
        return MemoryLayout()

    def open(self, layout: MemoryLayout) -> None: ...

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        self.done.append("forward")
        self.seen = [list(ids) for ids in token_ids]
        asked = [ids[len(ids) - c.num_rows :] for c, ids in zip(chunks, self.seen, strict=True)]
        return torch.tensor([token for ids in asked for token in ids], dtype=torch.float32)

    def logits(self, rows: Tensor) -> Tensor:
        self.head_rows.append(len(rows))
        logits = torch.nn.functional.one_hot((rows.long() + 1) % VOCAB, VOCAB).float()
        logits[rows == 400] = float("nan")
        return logits

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        self.done += [*blocks, *slots]


def begin(
    sequence_id: SequenceId, tokens: Sequence[int], num_prompt: int | None = None, **sampling: Any
) -> Begin:
    parameters = Sampling(**({"temperature": 0} | sampling))
    return Begin(sequence_id, array("i", tokens), num_prompt or len(tokens), 0, parameters)


def chunk(
    sequence_id: SequenceId, start: int, length: int, num_rows: int = 0, *draws: SequenceId
) -> Chunk:
    return Chunk(sequence_id, start, length, num_rows, draws, array("i"))


def run(runner: Runner, *chunks: Chunk, begun: tuple[Begin, ...] = ()) -> tuple[ChunkResult, ...]:
    return runner.launch(StepPlan(begun=begun, chunks=chunks)).result().chunks


def tokens(result: ChunkResult) -> list[int]:
    return [token_id for drawn in result.drawn for token_id in drawn.token_ids]


def test_a_decode_chunk_takes_its_token_from_the_last_draw() -> None:
    runner = Runner(lane := CountingLane())
    (first,) = run(runner, chunk(A, 0, 2, 1, A), begun=(begin(A, [7, 8]),))
    (second,) = run(runner, chunk(A, 2, 1, 1, A))
    assert (tokens(first), tokens(second), lane.seen) == ([9], [10], [[9]])


def test_a_chunk_that_asks_for_no_rows_draws_nothing() -> None:
    runner = Runner(lane := CountingLane())
    (result,) = run(runner, chunk(A, 0, 2), begun=(begin(A, [5, 6, 7]),))
    assert (result.drawn, lane.head_rows) == ((), [])


def test_siblings_draw_from_the_same_row_each_with_its_own_dice() -> None:
    runner = Runner(lane := CountingLane())
    both = (begin(A, [5]), begin(B, [5], logit_bias={3: 50.0}))
    (result,) = run(runner, chunk(A, 0, 1, 1, A, B), begun=both)
    assert (tokens(result), lane.head_rows) == ([6, 3], [1])


def test_one_bad_row_leaves_the_rest_of_the_step_alone() -> None:
    runner = Runner(CountingLane())
    begun = (begin(A, [400]), begin(B, [1]))
    bad, good = run(runner, chunk(A, 0, 1, 1, A), chunk(B, 0, 1, 1, B), begun=begun)
    assert bad.drawn[0].error and not bad.drawn[0].token_ids
    assert tokens(good) == [2]


@pytest.mark.parametrize("place", ["forward", "logits"])
def test_a_device_that_is_out_of_memory_raises_memory_error(place: str) -> None:
    lane = CountingLane()
    setattr(lane, place, lambda *_: torch.empty(1 << 50))
    with pytest.raises(MemoryError):
        run(Runner(lane), chunk(A, 0, 3, 1, A), begun=(begin(A, [1, 2, 3]),))


def test_a_step_on_a_gpu_ends_when_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a draw, nothing else waits for the GPU, and the step's time would be too short."""
    lane = CountingLane()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: lane.done.append(device.type))
    run(Runner(lane), chunk(A, 0, 2), begun=(begin(A, [5, 6, 7]),))
    lane.device = torch.device("cuda")
    run(Runner(lane), chunk(A, 0, 2), begun=(begin(A, [5, 6, 7]),))
    assert lane.done == ["forward", "forward", "cuda"]


def test_an_ended_sequence_may_begin_again_in_the_same_plan() -> None:
    runner = Runner(lane := CountingLane())
    run(runner, chunk(A, 0, 1, 1, A), begun=(begin(A, [4]),))
    again = StepPlan(
        begun=(begin(A, [4, 9], num_prompt=1),), chunks=(chunk(A, 0, 2, 1, A),), ended=(A,)
    )
    result = runner.launch(again).result()
    assert (lane.seen, tokens(result.chunks[0])) == ([[4, 9]], [10])


def test_ending_an_unknown_sequence_does_nothing() -> None:
    assert Runner(CountingLane()).launch(StepPlan(ended=(C,))).result().chunks == ()


class BlindLane(CountingLane):
    """Cannot read its images."""

    def begin(self, sequence_id: SequenceId, inputs: PromptInputs) -> None:
        raise FileNotFoundError

    def end(self, sequence_id: SequenceId) -> None:
        raise AssertionError("the sequence has not begun")


def test_a_sequence_that_could_not_begin_does_not_end_in_the_lane() -> None:
    """The step that ends it may be a step of another sequence, which would be blamed."""
    runner = Runner(BlindLane())
    inputs = PromptInputs((EncoderInput(0, 1, 1),))
    with pytest.raises(FileNotFoundError):
        run(runner, begun=(msgspec.structs.replace(begin(A, [1]), inputs=inputs),))
    (result,) = (
        runner.launch(StepPlan((begin(B, [2]),), (chunk(B, 0, 1, 1, B),), ended=(A,)))
        .result()
        .chunks
    )
    assert tokens(result) == [3]


def test_copies_are_made_once_each_after_the_forward() -> None:
    runner = Runner(lane := CountingLane())
    copies = (BlockCopy(BlockId(1), BlockId(2)),), (SlotCopy(SlotId(0), SlotId(1)),)
    plan = StepPlan((begin(A, [1]),), (chunk(A, 0, 1),), (), *copies)
    runner.launch(plan).result()
    assert lane.done == ["forward", *copies[0], *copies[1]]


def test_snapshots_are_restored_before_the_forward() -> None:
    runner = Runner(lane := CountingLane())
    restore = SlotCopy(SlotId(5), SlotId(0))
    plan = StepPlan((begin(A, [1]),), (chunk(A, 0, 1),), restores=(restore,))
    runner.launch(plan).result()
    assert lane.done == [restore, "forward"]


def test_the_begun_tokens_are_not_written_to() -> None:
    runner, start = Runner(CountingLane()), begin(A, [1])
    run(runner, chunk(A, 0, 1, 1, A), begun=(start,))
    assert start.token_ids.tolist() == [1]


def test_prompt_logprobs_cover_every_prompt_token_but_the_first_over_any_chunks() -> None:
    prompt = [(3 * i) % 300 for i in range(200)]
    packed = []
    for length in (200, 130, 7):
        runner = Runner(CountingLane())
        runner.launch(StepPlan(begun=(begin(A, prompt, num_prompt_logprobs=2),)))
        ids = b""
        for start in range(0, 200, length):
            rows = min(length, 200 - start)
            (result,) = run(runner, chunk(A, start, rows, rows))
            ids += result.prompt_logprobs.ids if result.prompt_logprobs else b""
        packed.append(ids)
    assert np.frombuffer(packed[0], np.int32).reshape(-1, 3)[:, 0].tolist() == prompt[1:]
    assert packed[0] == packed[1] == packed[2]


def test_prompt_rows_pass_the_head_in_bounded_groups_and_once_each() -> None:
    runner = Runner(lane := CountingLane())
    start = begin(A, [1] * 200, num_prompt_logprobs=0)
    run(runner, chunk(A, 0, 200, 200, A), begun=(start,))
    assert sum(lane.head_rows) == 200 and max(lane.head_rows) <= 64


def test_generated_tokens_of_a_recovered_sequence_get_no_prompt_logprobs() -> None:
    runner = Runner(CountingLane())
    start = begin(A, [1, 2, 3, 4, 5], num_prompt=3, num_prompt_logprobs=0)
    first, second = (
        run(runner, chunk(A, 0, 3, 3), begun=(start,))[0],
        run(runner, chunk(A, 3, 2, 2, A))[0],
    )
    assert first.prompt_logprobs is not None and second.prompt_logprobs is None
    assert np.frombuffer(first.prompt_logprobs.ids, np.int32).tolist() == [2, 3]


def test_token_logprobs_come_with_the_token_if_asked() -> None:
    runner = Runner(CountingLane())
    (result,) = run(runner, chunk(A, 0, 1, 1, A), begun=(begin(A, [8], num_logprobs=1),))
    logprobs = result.drawn[0].logprobs
    assert logprobs is not None and logprobs.width == 2
    assert np.frombuffer(logprobs.ids, np.int32).tolist() == [9, 9]


def test_a_recovered_sequence_draws_what_it_would_have_drawn() -> None:
    dice = {"temperature": 100.0, "seed": 3}
    whole = Runner(CountingLane())
    run(whole, chunk(A, 0, 2, 1, A), begun=(begin(A, [7, 8], **dice),))
    drawn = [tokens(run(whole, chunk(A, start, 1, 1, A))[0])[0] for start in (2, 3, 4)]
    resumed = Runner(CountingLane())
    start = begin(A, [7, 8, 1, drawn[0]], num_prompt=2, **dice)
    (result,) = run(resumed, chunk(A, 0, 4, 1, A), begun=(start,))
    assert tokens(result) == [drawn[1]]


def guessing(sequence_id: SequenceId, start: int, *guess: int) -> Chunk:
    size = 1 + len(guess)
    return Chunk(sequence_id, start, size, size, (sequence_id,), array("i"), guess=guess)


def test_tokens_are_drawn_for_as_long_as_they_were_guessed() -> None:
    runner = Runner(CountingLane())
    run(runner, begun=(begin(A, [10]), begin(B, [20], num_logprobs=1)))
    results = run(runner, guessing(A, 0, 11, 12, 99, 13), guessing(B, 0, 21))
    assert tokens(results[0]) == [11, 12, 13] and tokens(results[1]) == [21, 22]
    assert runner.lane.seen[0] == [10, 11, 12, 99, 13]
    rows = results[1].drawn[0].logprobs
    assert array("i", rows.ids).tolist()[::2] == [21, 22]
    assert tokens(run(runner, guessing(A, 3, 99))[0]) == [14]


@pytest.mark.parametrize(
    "sampling", [{"end_token_ids": (12,)}, {"stop_token_ids": (12,)}, {"max_tokens": 2}]
)
def test_nothing_is_drawn_behind_the_end(sampling: dict[str, Any]) -> None:
    runner = Runner(CountingLane())
    run(runner, begun=(begin(A, [10], **sampling),))
    assert tokens(run(runner, guessing(A, 0, 11, 12, 13))[0]) == [11, 12]


def test_a_row_that_is_no_number_keeps_the_tokens_before_it() -> None:
    runner = Runner(CountingLane())
    run(runner, begun=(begin(A, [398]),))
    (drawn,) = run(runner, guessing(A, 0, 399, 400, 401))[0].drawn
    assert drawn.token_ids == (399, 400) and drawn.error
