"""Reads the values of GGUF files, with the names and the row order of the original checkpoint."""

import mmap
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from headrace_common.checkpoints.headers import TensorHeader
from headrace_common.checkpoints.spec import ModelSpec
from headrace_engine.weights.gguf_groups import GROUP_SCHEMES, Array, Groups, read_groups
from headrace_engine.weights.gguf_orders import FileOrders

# Dequantize this many rows at a time, to bound the memory of the float32 values.
_ROWS_AT_ONCE = 1024


class GgufFile:
    def __init__(self, path: Path, spec: ModelSpec, headers: dict[str, TensorHeader]) -> None:
        self._headers = headers
        self._orders = FileOrders(spec)
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._content.close()

    def get_tensor(self, name: str) -> Tensor:
        """Return the dequantized tensor, float32."""
        target = torch.empty(self._headers[name].shape)
        self.copy_to(target, name)
        return target

    def copy_to(self, target: Tensor, name: str) -> None:
        """Dequantize a tensor into `target`, which may have any dtype.

        Dequantizes some rows at a time to bound memory.
        """
        header, raw = self._headers[name], self._raw(name)
        kind = GGMLQuantizationType[header.dtype]
        if len(header.shape) == 1:
            order = self._orders.row_order(name, header.shape[0])
            row = dequantize(raw, kind).astype(np.float32)[order]
            target.copy_(torch.from_numpy(self._orders.restore(name, row)))
            return
        raw, order = self._rows(name)
        columns = self._orders.column_order(name)
        target = target.flatten(1)
        for start in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[start : start + _ROWS_AT_ONCE]
            values = torch.from_numpy(dequantize(raw[rows], kind).astype(np.float32, copy=False))
            values = values if columns is None else values[:, columns]
            target[start : start + len(rows)].copy_(values)

    def copy_groups_to(self, target: Groups, name: str) -> None:
        """Copy a matrix into `target` without dequantizing it.

        `target` may have smaller groups and more bits per value than the file.
        """
        header = self._headers[name]
        raw, order = self._rows(name)
        columns, size = self._orders.column_order(name), GROUP_SCHEMES[header.dtype].size
        repeats = size // target.scheme.size
        for start in range(0, len(order), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            q, scale, minimum = map(torch.from_numpy, read_groups(raw[order[part]], header.dtype))
            if columns is not None:
                groups = columns[::size] // size
                q, scale, minimum = q[:, columns], scale[:, groups], minimum[:, groups]
            target.q[part] = q
            target.scale[part] = scale.repeat_interleave(repeats, dim=1)
            target.minimum[part] = minimum.repeat_interleave(repeats, dim=1)

    def _rows(self, name: str) -> tuple[Array, Array]:
        """Return a matrix's rows in the file as bytes, and the index of each original row."""
        header = self._headers[name]
        num_rows = header.shape[0]
        first, end = header.data_offsets
        row_bytes = (end - first) // num_rows
        if header.rows:
            num_rows = max(header.rows) + 1
            order = np.array(header.rows)
        else:
            order = self._orders.row_order(name, num_rows)
        raw = np.frombuffer(self._content, np.uint8, count=num_rows * row_bytes, offset=first)
        return raw.reshape(num_rows, row_bytes), order

    def _raw(self, name: str) -> Array:
        first, end = self._headers[name].data_offsets
        return np.frombuffer(self._content, np.uint8, count=end - first, offset=first)
