"""Blocks and slots as bytes: what is taken out comes back into other places, bit by bit."""

import pytest
import torch

from headrace_common.cache import LayerCache
from headrace_common.layout import MemoryLayout
from headrace_engine.runner.block_bytes import BlockBytes
from headrace_engine.runner.storage import CacheStorage

HYBRID = (
    LayerCache(2, 4, 6),
    LayerCache(state=(2, 3, 5), inputs=(3, 7)),
    LayerCache(1, 8, 8, window=4),
)
LAYOUT = MemoryLayout(4, num_blocks=9, num_slots=2, num_snapshots=1)


def make_storage(dtype: torch.dtype = torch.bfloat16) -> CacheStorage:
    storage = CacheStorage(HYBRID, LAYOUT, dtype, torch.device("cpu"))
    torch.manual_seed(0)
    for tensor in (*storage.keys, *storage.values, *storage.states, *storage.inputs):
        tensor.copy_(torch.randn(tensor.shape))
    return storage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_come_back_to_the_bit(dtype: torch.dtype) -> None:
    one, other = make_storage(dtype), make_storage(dtype)
    for tensor in (*other.keys, *other.values, *other.states, *other.inputs):
        tensor.zero_()
    taken = BlockBytes(one).get([5, 2, 8], 1)
    BlockBytes(other).put(taken, 3, 0, [0, 7, 3], 2)
    for before, after in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        assert torch.equal(before[[5, 2, 8]], after[[0, 7, 3]])
        assert not after[[1, 2, 4, 5, 6, 8]].any()
    for before, after in zip(
        (*one.states, *one.inputs), (*other.states, *other.inputs), strict=True
    ):
        assert torch.equal(before[1:2], after[2:3])
        assert not after[:2].any()


def test_the_first_blocks_may_be_left_out() -> None:
    one, other = make_storage(), make_storage()
    before = [tensor.clone() for tensor in other.keys]
    BlockBytes(other).put(BlockBytes(one).get([5, 2, 8]), 3, 2, [0], None)
    for source, old, new in zip(one.keys, before, other.keys, strict=True):
        assert torch.equal(new[:1], source[8:9])
        assert torch.equal(new[1:], old[1:])


def test_the_size_is_known_without_a_copy() -> None:
    numbers = BlockBytes(make_storage())
    assert numbers.block_bytes == 4 * 2 * (2 * 4 + 2 * 6 + 8 + 8)
    assert numbers.slot_bytes == 4 * 2 * 3 * 5 + 2 * 3 * 7
    assert len(numbers.get([1, 2], 0)) == 2 * numbers.block_bytes + numbers.slot_bytes
