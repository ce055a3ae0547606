"""The tensors of a model's cache; which block or slot is whose is not asked."""

import math
import mmap

import torch

from headrace_common.cache import ModelCache
from headrace_common.layout import MemoryLayout


class CacheStorage:
    """Per layer four tensors, empty where it keeps no such thing; who computes may order a head's.

    Keys and values are [blocks, kv_heads, block_size, dim]. States are float32 [slots, heads,
    key_dim, value_dim], and inputs of convolutions [slots, inputs, channels]. A slot's old content
    is worth nothing to a sequence that begins in it.
    """

    def __init__(
        self, cache: ModelCache, layout: MemoryLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cache, self.block_size, self.device = cache, layout.block_size, device
        self.keys, self.values, self.states, self.inputs = [], [], [], []
        num_slots = layout.num_slots + layout.num_snapshots
        for each in cache:
            block = layout.num_blocks, each.num_kv_heads, layout.block_size
            self.keys.append(_zeros((*block, each.key_dim), dtype, device))
            self.values.append(_zeros((*block, each.value_dim), dtype, device))
            self.states.append(_zeros((num_slots, *each.state), torch.float32, device))
            self.inputs.append(_zeros((num_slots, *each.inputs), dtype, device))

    def copy_block(self, source: int, target: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target].copy_(tensor[source])

    def copy_slot(self, source: int, target: int) -> None:
        for tensor in (*self.states, *self.inputs):
            tensor[target].copy_(tensor[source])


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: a NaN in an unwritten position would survive a weight of zero.

    On a CPU the system gives the memory when it is first written, not before it is needed, and in
    small pages: one of 2 MiB takes a millisecond to clear, and a block that begins one begins one
    in every layer, all in the same step.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # on Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
