"""The tensors of cached keys and values, and of states; which one is whose is not asked."""

import math
import mmap

import torch

from headrace.models.step import CacheShape, StateShape


class BlockStorage:
    """Per layer one tensor of keys and one of values, [num_blocks, kv_heads, block_size, dim].

    Who attends may let the numbers of a head's block lie in another order. Where the model has
    states, there are as many slots for them.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int = 0,
    ) -> None:
        size = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        self.shape = shape
        self.block_size = block_size
        self.device = device
        self.keys = [_zeros(size, dtype, device) for _ in shape.windows]
        self.values = [_zeros(size, dtype, device) for _ in shape.windows]
        self.states: StateStorage | None = None
        if shape.state is not None:
            self.states = StateStorage(shape.state, num_slots, dtype, device)

    def copy_block(self, source: int, target: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target].copy_(tensor[source])


class StateStorage:
    """Per layer the states of all slots, and the last inputs of their convolutions.

    States are float32 [slots, heads, key_dim, value_dim]; who computes with them may let the
    numbers of a head lie in another order. Inputs are [slots, num_inputs, channels]. A slot's old
    content is worth nothing to a sequence that begins in it.
    """

    def __init__(
        self, shape: StateShape, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        s = shape
        state = num_slots, s.num_heads, s.key_dim, s.value_dim
        inputs = num_slots, s.num_inputs, s.num_channels
        self.states = [_zeros(state, torch.float32, device) for _ in range(s.num_layers)]
        self.inputs = [_zeros(inputs, dtype, device) for _ in range(s.num_layers)]

    def copy_slot(self, source: int, target: int) -> None:
        for tensor in (*self.states, *self.inputs):
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


def bytes_per_slot(shape: StateShape, dtype: torch.dtype) -> int:
    inputs = shape.num_inputs * shape.num_channels * dtype.itemsize
    state = shape.num_heads * shape.key_dim * shape.value_dim * torch.float32.itemsize
    return shape.num_layers * (inputs + state)
