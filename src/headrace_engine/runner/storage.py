"""Allocates the tensors of a model's cache; does not know which sequence owns a block or slot."""

import math
import mmap

import torch

from headrace_common.cache import SCALE_BYTES, KvCacheDtype, ModelCache
from headrace_common.layout import MemoryLayout


class CacheStorage:
    """The cache of a model: four tensors per layer, empty if the layer has no such data.

    Keys and values are [blocks, kv_heads, block_size, dim]. States are float32 [slots, heads,
    key_dim, value_dim]. Convolution inputs are [slots, inputs, channels]. Kernels may use a
    different order within a head's part. A sequence that starts in a slot ignores the slot's old
    content.

    dtype: the format in which the model computes; everything in the cache except states has it too.
    But if `kv_cache_dtype` is int8, keys and values are [blocks, kv_heads, block_size, dim + 4]
    bytes, because each key and each value has a float32 scale.
    """

    def __init__(
        self,
        cache: ModelCache,
        layout: MemoryLayout,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        self.cache, self.block_size, self.device = cache, layout.block_size, device
        self.dtype, self.is_int8 = dtype, kv_cache_dtype == "int8"
        stored, more = (torch.int8, SCALE_BYTES) if self.is_int8 else (dtype, 0)
        self.keys, self.values, self.states, self.inputs = [], [], [], []
        num_slots = layout.num_slots + layout.num_snapshots
        for layer in cache:
            block = layout.num_blocks, layer.num_kv_heads, layout.block_size
            self.keys.append(_zeros((*block, layer.key_dim + more), stored, device))
            self.values.append(_zeros((*block, layer.value_dim + more), stored, device))
            self.states.append(_zeros((num_slots, *layer.state), torch.float32, device))
            self.inputs.append(_zeros((num_slots, *layer.inputs), dtype, device))

    def copy_block(self, source: int, target: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target].copy_(tensor[source])

    def copy_slot(self, source: int, target: int) -> None:
        for tensor in (*self.states, *self.inputs):
            tensor[target].copy_(tensor[source])


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, because a NaN in unused memory would survive an attention weight of 0.

    On a CPU, the system allocates a page when the page is first written, not earlier. Huge pages
    are turned off, because clearing a page of 2 MiB takes a millisecond. A sequence that starts a
    block touches a new page in every layer, all in the same step.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Only Linux has this option.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
