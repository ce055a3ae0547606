"""Computes attention on a CPU with kernels that read and write the cache through block tables.

The caller keeps track of which sequence owns which block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace_kernels import arguments as fields
from headrace_kernels.arguments import arguments_of
from headrace_kernels.delta_net import convolve, delta_rule
from headrace_kernels.instruction_sets import InstructionSet, instruction_sets_here
from headrace_kernels.launch import parallel
from headrace_kernels.paged_attention import kernels_for
from headrace_kernels.step import CacheMemory, PackedStep


class CpuAttention:
    """Computes attention over one cache, and writes all new keys, values and states to the cache.

    windows: for each layer, the number of visible positions including the token's own; None: all.
    sinks: for each layer, float32 [heads] or None. A sink is a score that counts in the softmax but
    has no value.
    Raises ValueError if a layer's keys and values differ in shape.
    """

    def __init__(
        self,
        memory: CacheMemory,
        windows: Sequence[int | None],
        sinks: Sequence[Tensor | None] = (),
        instructions: InstructionSet | None = None,
    ) -> None:
        self.memory, self.windows = memory, windows
        self.sinks = sinks
        self.instructions = instructions or instruction_sets_here()[0]
        self.kernels = [
            kernels_for(keys, values, memory.dtype, self.instructions)
            for keys, values in zip(memory.keys, memory.values, strict=True)
        ]

    def step(self, batch: PackedStep) -> "CpuStep":
        return CpuStep(self, batch)


class CpuStep:
    """Attention for one forward step. The chunks are set once; each layer sets its tensors."""

    def __init__(self, attention: CpuAttention, batch: PackedStep) -> None:
        self.positions = batch.positions
        self._attention, self._batch = attention, batch
        self._arguments = arguments = arguments_of(*[0] * (fields.SIZE - 1))
        arguments[fields.STARTS] = batch.starts.ctypes.data
        arguments[fields.LENGTHS] = batch.lengths.ctypes.data
        arguments[fields.FIRST_ROWS] = batch.first_rows.ctypes.data
        arguments[fields.TABLE] = batch.block_table.ctypes.data
        arguments[fields.NUM_CHUNKS : fields.TABLE_WIDTH + 1] = batch.block_table.shape

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cap: float | None = None
    ) -> Tensor:
        """Write k and v into the cache; then each row of q attends to all positions up to its own.

        q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]; returns [tokens, heads, dim].
        Scores are scaled by dim ** -0.5. With a cap, scores become cap * tanh(score / cap).
        """
        attention, arguments = self._attention, self._arguments
        memory = attention.memory
        q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        fields.set_memory(arguments, memory.keys[layer], memory.values[layer])
        fields.set_new(arguments, q, k, v, out)
        arguments[fields.WINDOW] = attention.windows[layer] or 0
        sinks = attention.sinks[layer] if attention.sinks else None
        arguments[fields.SINKS] = 0 if sinks is None else sinks.data_ptr()
        arguments[fields.NUM_SINKS] = 0 if sinks is None else len(sinks)
        arguments[fields.CAP] = round((cap or 0) * 1e6)
        for kernel in attention.kernels[layer]:
            parallel(kernel, arguments)
        return out

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return convolve(self._batch, self._attention.memory.inputs[layer], x, weight)

    def delta_rule(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
    ) -> Tensor:
        return delta_rule(self._batch, self._attention.memory.states[layer], qkv, decay, beta)


def _side_by_side(x: Tensor) -> Tensor:
    """Return x [tokens, heads, dim], copied only if the heads of a token are not contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
