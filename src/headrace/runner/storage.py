"""Block memory: the tensors that hold cached keys and values; which block is whose is not asked."""

import math
import mmap

import torch

from headrace.models.step import CacheShape


class BlockStorage:
    """Per layer one tensor of keys and one of values, [num_blocks, kv_heads, block_size, dim].

    Who attends may let the numbers of a head's block lie in another order.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        self.shape = shape
        self.block_size = block_size
        self.device = device
        self.keys = [_zeros(size, dtype, device) for _ in shape.windows]
        self.values = [_zeros(size, dtype, device) for _ in shape.windows]

    def copy_block(self, source: int, target: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target].copy_(tensor[source])


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: a NaN in an unwritten position would survive a weight of zero.

    On a CPU the system gives the memory when it is first written, not before it is needed, and in
    small pages: one of 2 MiB takes a millisecond to clear, and a block that begins one begins one
    in every layer, all in the same step.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # on Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def bytes_per_position(shape: CacheShape, dtype: torch.dtype) -> int:
    return shape.values_per_position * dtype.itemsize
