"""Implements attention for GPUs in plain torch: all decode chunks of a step run together.

A GPU takes microseconds for a small operation, and the CPU needs longer to launch the operation. So
the time of a decode step depends on the number of operations, not on their size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.models.delta_rule import convolve_of_many, delta_rule_of_many
from headrace_engine.models.step import Step
from headrace_engine.runner.attention import NaiveAttention, NaiveStep
from headrace_engine.runner.inputs import Batch, Ints
from headrace_engine.runner.storage import CacheStorage

# The maximum number of positions of a group, including padding. It bounds the memory of the copies:
# one layer of a model with 8 heads of 128 numbers copies 256 MiB of keys in bfloat16.
_MOST_POSITIONS = 1 << 17


def plain_attention(storage: CacheStorage, sinks: Sequence[Tensor | None] = ()) -> NaiveAttention:
    """Return the attention in plain torch that suits the device of the storage."""
    if storage.device.type == "cpu":
        return NaiveAttention(storage, sinks)
    return BatchedAttention(storage, sinks)


class BatchedAttention(NaiveAttention):
    """Computes in the dtype of the cache, and without masks where torch allows it."""

    def step(self, batch: Batch) -> Step:
        return _BatchedStep(self, batch)


class _Group(NamedTuple):
    """Decode chunks whose sequences have similar lengths."""

    rows: Tensor  # int64 [chunks]: the index of each chunk's token in the batch
    table: Tensor  # int64 [chunks, blocks], padded with the chunk's last block
    positions: Tensor  # int64 [chunks, 1]: the position of each chunk's token


class _BatchedStep(NaiveStep):
    def __init__(self, attention: NaiveAttention, batch: Batch) -> None:
        super().__init__(attention, batch)
        # A sequence's first token is not a decode chunk, because its state must be cleared.
        is_decode = (batch.lengths == 1) & (batch.starts > 0)
        decoding = np.flatnonzero(is_decode)
        self._one_by_one = np.flatnonzero(~is_decode).tolist()
        self._rows = self._on_device(batch.first_rows[decoding])
        self._slots = self._on_device(batch.slots[decoding])
        self._begun = self._on_device(_begun_blocks(batch, self._storage.block_size))
        self._groups = [self._group(part) for part in _similar(batch.starts, decoding)]
        # The masks of each group, by the window of the layer and the dtype.
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}

    def _on_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._storage.device)

    def _group(self, chunks: NDArray[np.integer]) -> _Group:
        batch = self._batch
        lasts = batch.starts[chunks, None] // self._storage.block_size
        numbers = np.arange(int(lasts.max()) + 1)
        # Pad with blocks of the same sequence: others may hold NaN, and 0 times NaN is NaN.
        table = batch.block_table[chunks[:, None], np.minimum(numbers, lasts)]
        return _Group(
            self._on_device(batch.first_rows[chunks]),
            self._on_device(table),
            self._on_device(batch.starts[chunks, None]),
        )

    def _write(self, memory: Tensor, new: Tensor) -> None:
        """Write the new rows, after clearing the blocks that begin with a new row.

        Decode chunks read whole blocks, and 0 times an old NaN would be NaN.
        """
        if len(self._begun):
            memory.index_fill_(0, self._begun, 0)
        super()._write(memory, new)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cap: float | None = None
    ) -> Tensor:
        if cap is not None or (self._attention.sinks and self._attention.sinks[layer] is not None):
            return super().attend(layer, q, k, v, cap)
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        self._write(keys, k)
        self._write(values, v)
        window, q = self._storage.cache[layer].window, q.to(keys.dtype)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for group, mask in zip(self._groups, self._masks_of(window, q.dtype), strict=True):
            out[group.rows] = _attend_last(q[group.rows], keys, values, group.table, mask)
        for chunk in self._one_by_one:
            first = int(self._batch.first_rows[chunk])
            rows = slice(first, first + int(self._batch.lengths[chunk]))
            out[rows] = self._attend_prompt(chunk, q[rows], keys, values, window)
        return out

    def _masks_of(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        if (window, dtype) not in self._masks:
            size = self._storage.block_size
            self._masks[window, dtype] = [
                _last_mask(group, group.table.shape[1] * size, window, dtype)
                for group in self._groups
            ]
        return self._masks[window, dtype]

    def _attend_prompt(
        self, chunk: int, q: Tensor, keys: Tensor, values: Tensor, window: int | None
    ) -> Tensor:
        # This import loads sympy, which takes seconds. Models on a CPU do not need it.
        from torch.nn.attention.bias import causal_lower_right

        length, end = len(q), int(self._batch.starts[chunk]) + len(q)
        table = self._tables[chunk, : -(-end // self._storage.block_size)]
        past, seen = (_gathered(memory, table)[:, :end] for memory in (keys, values))
        q = q.transpose(0, 1)  # [heads, length, dim]
        group = len(q) // len(past)
        if window is None or window >= end:
            mask: Tensor = causal_lower_right(length, end)
        else:
            own = torch.arange(end - length, end, device=q.device)[:, None]
            other = torch.arange(end, device=q.device)
            mask = (other <= own) & (other > own - window)
        # Torch's kernel for bfloat16 lets heads share keys; the kernel for float32 does not.
        can_share = q.dtype == torch.bfloat16 and (window is None or window >= end)
        if not can_share:
            past, seen = (each.repeat_interleave(group, 0) for each in (past, seen))
        out = F.scaled_dot_product_attention(
            q[None], past[None], seen[None], attn_mask=mask, enable_gqa=can_share
        )
        return out[0].transpose(0, 1)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        out = super().convolve(layer, x, weight)
        if len(self._rows):
            memory, new = self._storage.inputs[layer], x[self._rows]
            before = memory[self._slots]
            out[self._rows] = convolve_of_many(new, weight, before)
            memory[self._slots] = torch.cat((before, new[:, None]), dim=1)[:, 1:]
        return out

    def delta_rule(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
    ) -> Tensor:
        out = super().delta_rule(layer, qkv, decay, beta)
        if len(rows := self._rows):
            q, k, v = (each[rows] for each in qkv)
            states = self._storage.states[layer][self._slots]
            out[rows] = delta_rule_of_many((q, k, v), decay[rows], beta[rows], states)
            self._storage.states[layer][self._slots] = states
        return out


def _begun_blocks(batch: Batch, block_size: int) -> Ints:
    """Return the blocks whose first position is written in this step."""
    firsts = -(-batch.starts // block_size)
    ends = (batch.starts + batch.lengths - 1) // block_size + 1
    begun = [batch.block_table[n, firsts[n] : ends[n]] for n in np.flatnonzero(firsts < ends)]
    return np.concatenate(begun) if begun else np.empty(0, np.int32)


def _similar(starts: Ints, chunks: NDArray[np.integer]) -> Iterator[NDArray[np.integer]]:
    """Divide chunks into groups that waste at most half of their positions on padding."""
    group: list[int] = []
    for chunk in sorted(chunks.tolist(), key=starts.__getitem__):
        positions = int(starts[chunk]) + 1
        is_far = group and positions > 2 * (int(starts[group[0]]) + 1)
        if is_far or (group and positions * (len(group) + 1) > _MOST_POSITIONS):
            yield np.array(group)
            group = []
        group.append(chunk)
    if group:
        yield np.array(group)


def _last_mask(group: _Group, num: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return [chunks, 1, 1, num]: 0 where a chunk's token attends, and minus infinity elsewhere."""
    positions = torch.arange(num, device=group.positions.device)
    visible = positions <= group.positions
    if window is not None:
        visible &= positions > group.positions - window
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None, None]


def _attend_last(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """Let one token of each sequence attend: q is [sequences, heads, dim].

    The heads that share keys become the rows of one head, so that torch does not copy keys.
    """
    past, seen = (_gathered(memory, table).transpose(0, 1) for memory in (keys, values))
    grouped = q.unflatten(1, (past.shape[1], -1))  # [sequences, kv_heads, heads / kv_heads, dim]
    mask = mask.expand(-1, *grouped.shape[1:3], -1)
    return F.scaled_dot_product_attention(grouped, past, seen, attn_mask=mask).flatten(1, 2)


def _gathered(memory: Tensor, table: Tensor) -> Tensor:
    """Return [kv_heads, *sequences, positions, dim] for a table [*sequences, blocks]."""
    return memory.transpose(0, 1)[:, table].flatten(-3, -2)
