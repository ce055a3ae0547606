import pytest
import torch

from headrace_common.cache import KvCacheDtype, LayerCache, bytes_per_position, bytes_per_slot
from headrace_common.layout import MemoryLayout
from headrace_engine.runner.storage import CacheStorage

# attention to all, a window over values of another size than keys, and a state instead of both
CACHE = (
    LayerCache(num_kv_heads=2, key_dim=3, value_dim=3),
    LayerCache(num_kv_heads=1, key_dim=7, value_dim=5, window=8),
    LayerCache(state=(4, 3, 2), inputs=(3, 10)),
)
LAYOUT = MemoryLayout(block_size=5, num_blocks=4, num_slots=2, num_snapshots=1)


def storage(
    dtype: torch.dtype = torch.float32, kv_cache_dtype: KvCacheDtype = "auto"
) -> CacheStorage:
    return CacheStorage(CACHE, LAYOUT, dtype, torch.device("cpu"), kv_cache_dtype)


def test_a_copied_block_is_equal_in_every_layer_and_leaves_the_others_alone() -> None:
    held = storage()
    for tensor in (*held.keys, *held.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in held.keys]
    held.copy_block(1, 3)
    for tensor, old in zip(held.keys, before, strict=True):
        assert torch.equal(tensor[3], old[1]) and torch.equal(tensor[:3], old[:3])
    assert all(torch.equal(tensor[3], tensor[1]) for tensor in held.values)


def test_a_copied_slot_is_equal_in_states_and_inputs() -> None:
    held = storage()
    held.states[2].normal_()
    held.inputs[2].normal_()
    held.copy_slot(0, 2)
    assert torch.equal(held.states[2][2], held.states[2][0])
    assert torch.equal(held.inputs[2][2], held.inputs[2][0])


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_the_cache_says_how_many_bytes_the_tensors_take(kind: KvCacheDtype) -> None:
    held = storage(torch.bfloat16, kind)
    of_blocks = sum(tensor.nbytes for tensor in (*held.keys, *held.values))
    of_slots = sum(tensor.nbytes for tensor in (*held.states, *held.inputs))
    assert of_blocks == 4 * 5 * bytes_per_position(CACHE, 2, kind) > 0
    assert of_slots == 3 * bytes_per_slot(CACHE, 2) > 0
