"""The attention for GPUs against the naive attention, on the CPU: decode chunks beside prompts."""

from array import array

import numpy as np
import pytest
import torch

from headrace_common.cache import LayerCache
from headrace_common.ids import SequenceId, SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Chunk
from headrace_engine.runner import batched_attention
from headrace_engine.runner.attention import NaiveAttention
from headrace_engine.runner.batched_attention import BatchedAttention
from headrace_engine.runner.inputs import Batch, pack
from headrace_engine.runner.storage import CacheStorage

HEADS, BLOCK, NUM = 4, 4, 6
CPU = torch.device("cpu")
STEPS = [
    [5, 1, 3, 30, 1, 2],
    [1, 1, 1, 1, 1, 4],
    [1, 1, 1, 1, 1, 1],
    [1, 2, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 1],
]
"""For each step, the number of new tokens of each sequence."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def batches() -> list[Batch]:
    positions, found = [0] * NUM, []
    for lengths in STEPS:
        chunks = [
            Chunk(SequenceId(n), positions[n], length, 0, (), blocks_of(n), SlotId(NUM - 1 - n))
            for n, length in enumerate(lengths)
        ]
        found.append(pack(chunks, [array("i", [0] * length) for length in lengths], BLOCK, CPU))
        positions = [start + length for start, length in zip(positions, lengths, strict=True)]
    return found


def blocks_of(number: int) -> "array[int]":
    return array("i", range(10 * number + 9, 10 * number - 1, -1))


def both(
    cache: LayerCache, dtype: torch.dtype, sinks: tuple[torch.Tensor, ...] = ()
) -> tuple[NaiveAttention, BatchedAttention]:
    layout = MemoryLayout(BLOCK, num_blocks=10 * NUM, num_slots=NUM)
    naive, batched = (CacheStorage((cache,), layout, dtype, CPU) for _ in range(2))
    return NaiveAttention(naive, sinks), BatchedAttention(batched, sinks)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("way", ["plain", "capped", "sinks", "values of another size"])
def test_it_attends_as_the_naive_attention(
    way: str, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    value_dim = 12 if way == "values of another size" else 8
    sinks = (torch.randn(HEADS),) if way == "sinks" else ()
    naive, batched = both(LayerCache(2, 8, value_dim, window), dtype, sinks)
    for batch in batches():
        size = len(batch.token_ids)
        q, k, v = (torch.randn(size, n, dim) for n, dim in ((HEADS, 8), (2, 8), (2, value_dim)))
        given = q.to(dtype), k.to(dtype), v.to(dtype), 0.5 if way == "capped" else None
        expected, found = (it.step(batch).attend(0, *given) for it in (naive, batched))
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)


def test_what_a_block_held_before_does_not_matter() -> None:
    """For example, the numbers of a request that ended because they were not finite."""
    torch.manual_seed(0)
    naive, batched = both(LayerCache(2, 8, 8), torch.float32)
    for memory in (*batched.storage.keys, *batched.storage.values):
        memory.fill_(float("nan"))
    for batch in batches():
        q, k, v = (torch.randn(len(batch.token_ids), n, 8) for n in (HEADS, 2, 2))
        expected, found = (it.step(batch).attend(0, q, k, v) for it in (naive, batched))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_long_sequences_are_not_padded_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.array([7, 100, 0, 8, 99, 15, 40], np.int32)
    chunks = np.array([0, 1, 3, 4, 5, 6])
    groups = [part.tolist() for part in batched_attention._similar(starts, chunks)]
    assert groups == [[0, 3, 5], [6], [4, 1]]
    monkeypatch.setattr(batched_attention, "_MOST_POSITIONS", 150)
    groups = [part.tolist() for part in batched_attention._similar(starts, chunks)]
    assert groups == [[0, 3, 5], [6], [4], [1]]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_states_and_convolutions_are_those_of_the_naive_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    naive, batched = both(LayerCache(state=(HEADS, 8, 6), inputs=(3, 16)), dtype)
    for batch in batches():
        size = len(batch.token_ids)
        steps = naive.step(batch), batched.step(batch)
        x, weight = torch.randn(size, 16).to(dtype), torch.randn(4, 16).to(dtype)
        torch.testing.assert_close(*(step.convolve(0, x, weight) for step in steps))
        qkv = torch.randn(size, 2, 8), torch.randn(size, 2, 8), torch.randn(size, HEADS, 6)
        decay, beta = -torch.rand(size, HEADS), torch.rand(size, HEADS)
        torch.testing.assert_close(*(step.delta_rule(0, qkv, decay, beta) for step in steps))
    torch.testing.assert_close(batched.storage.states, naive.storage.states)
    torch.testing.assert_close(batched.storage.inputs, naive.storage.inputs)
