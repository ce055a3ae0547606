import torch

from headrace.models.step import CacheShape
from headrace.runner.storage import BlockStorage, bytes_per_position

SHAPE = CacheShape(num_kv_heads=2, head_dim=3, windows=(None, 8))


def test_a_copied_block_is_equal_in_every_layer_and_leaves_the_others_alone() -> None:
    storage = BlockStorage(SHAPE, 4, 5, torch.float32, torch.device("cpu"))
    for tensor in (*storage.keys, *storage.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in storage.keys]
    storage.copy_block(1, 3)
    for tensor, old in zip(storage.keys, before, strict=True):
        assert torch.equal(tensor[3], old[1]) and torch.equal(tensor[:3], old[:3])
    assert all(torch.equal(tensor[3], tensor[1]) for tensor in storage.values)


def test_a_position_takes_keys_and_values_of_every_layer() -> None:
    assert bytes_per_position(SHAPE, torch.bfloat16) == 2 * 2 * 2 * 3 * 2
