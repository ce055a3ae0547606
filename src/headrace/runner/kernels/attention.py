"""Owns attention on a CPU: short chunks in one kernel, long ones by matrix products.

Both read and write block memory through block tables; which block is whose is not asked.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.models.step import Step
from headrace.runner.inputs import SHORT, Batch
from headrace.runner.kernels import frame as fields
from headrace.runner.kernels.pool import frame_of, spread
from headrace.runner.kernels.private import has_fast_bf16
from headrace.runner.kernels.prompt import (
    BASE,
    CHUNK,
    GATHER,
    GATHER_SIZE,
    PAST_KEYS,
    PAST_VALUES,
    SOFTMAX,
    TOTAL,
)
from headrace.runner.kernels.short import SHORT_CHUNKS
from headrace.runner.storage import BlockStorage

_SCORES = 1 << 21  # scores held at a time: they stay in the cache between product and softmax
_MIN_TILE = 32  # queries


class CpuAttention:
    """Bound to one storage; `sinks` are per layer float32 [heads], scores that hold no value."""

    def __init__(self, storage: BlockStorage, sinks: Sequence[Tensor] = ()) -> None:
        self.storage = storage
        self.sinks = sinks
        cache = storage.keys[0].dtype
        wide = cache if has_fast_bf16() else torch.float32
        self.gather, self.softmax = GATHER[cache, wide], SOFTMAX[wide]
        self.short, self.wide = SHORT_CHUNKS[cache], wide

    def step(self, batch: Batch) -> Step:
        return CpuStep(self, batch)


class CpuStep:
    """One step's frame: chunks filled in once, the rest by each layer."""

    def __init__(self, attention: CpuAttention, batch: Batch) -> None:
        self.positions = batch.positions
        self._attention, self._batch = attention, batch
        self._longs = np.flatnonzero(batch.lengths > SHORT).tolist()
        self._frame = frame = frame_of(*[0] * (GATHER_SIZE - 1))
        frame[fields.WHICH], frame[fields.NUM_WHICH] = batch.shorts.ctypes.data, len(batch.shorts)
        frame[fields.STARTS] = batch.starts.ctypes.data
        frame[fields.LENGTHS] = batch.lengths.ctypes.data
        frame[fields.FIRST_ROWS] = batch.first_rows.ctypes.data
        frame[fields.TABLE] = batch.block_table.ctypes.data
        frame[fields.NUM_CHUNKS : fields.TABLE_WIDTH + 1] = batch.block_table.shape

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention, frame = self._attention, self._frame
        storage = attention.storage
        q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        fields.set_memory(frame, storage.keys[layer], storage.values[layer])
        fields.set_new(frame, q, k, v, out)
        frame[fields.WINDOW] = storage.shape.windows[layer] or 0
        if attention.sinks:
            frame[fields.SINKS] = attention.sinks[layer].data_ptr()
            frame[fields.NUM_SINKS] = len(attention.sinks[layer])
        if len(self._batch.shorts):
            spread(attention.short, frame)
        for chunk in self._longs:
            self._attend_long(chunk, q, out)
        return out

    def _attend_long(self, chunk: int, q: Tensor, out: Tensor) -> None:
        start, length = int(self._batch.starts[chunk]), int(self._batch.lengths[chunk])
        first_row, window = int(self._batch.first_rows[chunk]), self._frame[fields.WINDOW]
        size = self._attention.storage.block_size
        base = max(0, start + 1 - window) // size * size if window else 0
        keys, values = self._past(chunk, base, start + length)
        heads, _, dim = keys.shape
        rows = slice(first_row, first_row + length)
        # [kv_heads, length * group, dim]: the queries that share keys lie below each other
        queries = q[rows].view(length, heads, -1, dim).transpose(0, 1).to(keys.dtype)
        queries = (queries * dim**-0.5).reshape(heads, -1, dim)
        target = out[rows].view(length, heads, -1, dim).transpose(0, 1)
        for first, stop in _tiles(length, start + length - base, q.shape[1]):
            low = max(0, start + first + 1 - window) - base if window else 0
            high = start + stop - base
            tile = queries.view(heads, length, -1, dim)[:, first:stop].flatten(1, 2)
            weighed = self._weigh(
                tile, keys[:, low:high], values[:, low:high], start + first - base - low
            )
            target[:, first:stop] = weighed.view(heads, stop - first, -1, dim)

    def _past(self, chunk: int, base: int, total: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [base, total), [kv_heads, positions, dim]."""
        attention, frame = self._attention, self._frame
        shape = attention.storage.shape
        past = torch.empty(
            (2, shape.num_kv_heads, total - base, shape.head_dim), dtype=attention.wide
        )
        frame[CHUNK], frame[BASE], frame[TOTAL] = chunk, base, total
        frame[PAST_KEYS], frame[PAST_VALUES] = past[0].data_ptr(), past[1].data_ptr()
        spread(attention.gather, frame)
        return past[0], past[1]

    def _weigh(self, queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Attention of a tile of queries; the first of them stands at key number `start`."""
        scores = torch.bmm(queries, keys.transpose(1, 2))
        inverse = torch.empty(scores.shape[:2])
        frame = frame_of(
            *scores.shape,
            self._frame[fields.GROUP],
            start,
            self._frame[fields.WINDOW],
            self._frame[fields.SINKS],
            self._frame[fields.NUM_SINKS],
            inverse.data_ptr(),
            scores.data_ptr(),
        )
        spread(self._attention.softmax, frame)
        return torch.bmm(scores, values) * inverse[:, :, None]


def _side_by_side(x: Tensor) -> Tensor:
    """x [tokens, heads, dim], copied only if a token's heads do not lie in a row."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _tiles(length: int, num_keys: int, num_heads: int) -> list[tuple[int, int]]:
    """Ranges of queries whose scores, over all heads, are few enough to stay in the cache."""
    tile = max(_MIN_TILE, _SCORES // (num_keys * num_heads))
    return [(first, min(first + tile, length)) for first in range(0, length, tile)]
