"""Attention over block memory: the seam, and its naive form, which a fast one must equal."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.models.step import Step
from headrace.runner.inputs import Batch
from headrace.runner.storage import BlockStorage


class Attention(Protocol):
    """Bound to one storage; makes the object through which a model attends in one step."""

    def step(self, batch: Batch) -> Step: ...


class NaiveAttention:
    def __init__(self, storage: BlockStorage) -> None:
        self._storage = storage

    def step(self, batch: Batch) -> Step:
        return _NaiveStep(self._storage, batch)


class _NaiveStep:
    """Gathers each chunk's past through its block table and attends in float32."""

    def __init__(self, storage: BlockStorage, batch: Batch) -> None:
        self._storage = storage
        self._batch = batch
        self.positions = batch.positions
        self._tables = torch.from_numpy(batch.block_table).to(storage.device).long()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        self._write(keys, k)
        self._write(values, v)
        out = torch.empty_like(q)
        for chunk, first in enumerate(self._batch.first_rows.tolist()):
            end = first + int(self._batch.lengths[chunk])
            past = self._gather(keys, chunk), self._gather(values, chunk)
            out[first:end] = self._attend_chunk(layer, chunk, q[first:end], past)
        return out

    def _write(self, memory: Tensor, new: Tensor) -> None:
        size = self._storage.block_size
        index = self._batch.write_index
        memory[index // size, :, index % size] = new

    def _gather(self, memory: Tensor, chunk: int) -> Tensor:
        """All positions of one chunk's sequence so far, float32 [kv_heads, positions, dim]."""
        num_positions = int(self._batch.starts[chunk] + self._batch.lengths[chunk])
        blocks = memory[self._tables[chunk]]  # [blocks, kv_heads, block_size, dim]
        return blocks.transpose(0, 1).flatten(1, 2)[:, :num_positions].float()

    def _attend_chunk(
        self, layer: int, chunk: int, q: Tensor, past: tuple[Tensor, Tensor]
    ) -> Tensor:
        keys, values = past
        start, length = int(self._batch.starts[chunk]), len(q)
        own = torch.arange(start, start + length, device=q.device)[:, None]
        other = torch.arange(keys.shape[1], device=q.device)
        visible = other <= own  # [length, positions]
        window = self._storage.shape.windows[layer]
        if window is not None:
            visible &= other > own - window
        q = q.float().transpose(0, 1)  # [heads, length, dim]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
        return out.transpose(0, 1).to(self._storage.keys[layer].dtype)
