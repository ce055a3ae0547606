"""Defines the interface through which models use the cache, and implements it in plain torch."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace_engine.models.delta_rule import convolve, delta_rule
from headrace_engine.models.step import Step
from headrace_engine.runner.inputs import Batch
from headrace_engine.runner.storage import CacheStorage
from headrace_kernels import dequantize_rows, quantize_rows


class Attention(Protocol):
    """Serves one cache: creates the Step through which a model uses the cache."""

    def step(self, batch: Batch) -> Step: ...


class NaiveAttention:
    """Implements attention in plain torch, as the reference for the kernels.

    `sinks` has a float32 tensor [heads] or None for each layer.
    """

    def __init__(self, storage: CacheStorage, sinks: Sequence[Tensor | None] = ()) -> None:
        self.storage, self.sinks = storage, sinks

    def step(self, batch: Batch) -> Step:
        return NaiveStep(self, batch)


class NaiveStep:
    """Gathers the keys and values of each chunk by block table, and attends in float32."""

    def __init__(self, attention: NaiveAttention, batch: Batch) -> None:
        self._attention = attention
        self._storage = storage = attention.storage
        self._batch = batch
        self.positions = batch.positions
        self._tables = torch.from_numpy(batch.block_table).to(storage.device).long()
        size = storage.block_size
        self._blocks, self._offsets = batch.write_index // size, batch.write_index % size
        # The chunks whose states and convolutions are computed one chunk after the other.
        self._one_by_one: Sequence[int] = range(len(batch.lengths))

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cap: float | None = None
    ) -> Tensor:
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        if self._storage.is_int8:
            k, v = quantize_rows(k), quantize_rows(v)
        self._write(keys, k)
        self._write(values, v)
        out = q.new_empty(*q.shape[:2], self._storage.cache[layer].value_dim)
        for chunk, first in enumerate(self._batch.first_rows.tolist()):
            end = first + int(self._batch.lengths[chunk])
            past = self._gather(keys, chunk), self._gather(values, chunk)
            out[first:end] = self._attend_chunk(layer, chunk, q[first:end], past, cap)
        return out

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for rows, inputs in self._by_sequence(self._storage.inputs[layer]):
            extended = torch.cat((inputs, x[rows]))
            out[rows] = convolve(x[rows], weight, inputs)
            inputs.copy_(extended[len(extended) - len(inputs) :])
        return out

    def delta_rule(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
    ) -> Tensor:
        q, k, v = qkv
        out = torch.empty_like(v)
        for rows, state in self._by_sequence(self._storage.states[layer]):
            out[rows] = delta_rule((q[rows], k[rows], v[rows]), decay[rows], beta[rows], state)
        return out

    def _by_sequence(self, memory: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk's slice of rows, with the part of `memory` in the chunk's slot.

        If the chunk starts at position 0, this part is set to zero first.
        """
        batch = self._batch
        for chunk in self._one_by_one:
            first = int(batch.first_rows[chunk])
            part = memory[int(batch.slots[chunk])]
            if not batch.starts[chunk]:
                part.zero_()
            yield slice(first, first + int(batch.lengths[chunk])), part

    def _write(self, memory: Tensor, new: Tensor) -> None:
        memory[self._blocks, :, self._offsets] = new

    def _gather(self, memory: Tensor, chunk: int) -> Tensor:
        """Return all positions of a chunk's sequence, float32 [kv_heads, positions, dim]."""
        num_positions = int(self._batch.starts[chunk] + self._batch.lengths[chunk])
        blocks = memory[self._tables[chunk]]  # [blocks, kv_heads, block_size, dim]
        rows = blocks.transpose(0, 1).flatten(1, 2)[:, :num_positions]
        return dequantize_rows(rows) if self._storage.is_int8 else rows.float()

    def _attend_chunk(
        self, layer: int, chunk: int, q: Tensor, past: tuple[Tensor, Tensor], cap: float | None
    ) -> Tensor:
        keys, values = past
        start, length = int(self._batch.starts[chunk]), len(q)
        own = torch.arange(start, start + length, device=q.device)[:, None]
        other = torch.arange(keys.shape[1], device=q.device)
        visible = other <= own  # [length, positions]
        window = self._storage.cache[layer].window
        if window is not None:
            visible &= other > own - window
        q = q.float().transpose(0, 1)  # [heads, length, dim]
        sinks = self._attention.sinks[layer] if self._attention.sinks else None
        if cap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=visible, enable_gqa=True
            )
        else:
            out = _weigh(q, keys, values, visible, cap, sinks)
        return out.transpose(0, 1).to(self._storage.dtype)


def _weigh(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with scores capped as cap * tanh(score / cap), and with an optional sink per head."""
    group = len(q) // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = q @ keys.transpose(1, 2) * q.shape[2] ** -0.5  # [heads, length, positions]
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1] @ values
    return scores.softmax(-1) @ values
