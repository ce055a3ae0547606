"""Reads the tensors of images that a worker has prepared, and caches image features."""

from collections import OrderedDict
from pathlib import Path

import msgspec
import torch
from torch import Tensor

# The maximum number of bytes of all cached features.
_FEATURE_BYTES = 256 << 20


class ImageTensors(msgspec.Struct, frozen=True):
    """Describes the tensors of one image in the file at `path`.

    A tensor is described by its name, dtype, shape and offset. `positions` describes the
    positions of the whole prompt, if the model's positions have three axes.
    """

    path: str
    num_rows: int  # the number of placeholder tokens
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    positions: tuple[str, str, tuple[int, ...], int] | None = None

    def read(self) -> dict[str, Tensor]:
        return {name: self._tensor(dtype, shape, at) for name, dtype, shape, at in self.tensors}

    def read_positions(self) -> Tensor | None:
        return None if self.positions is None else self._tensor(*self.positions[1:])

    def _tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
        kind = getattr(torch, dtype)
        size = int(torch.tensor(shape).prod()) if shape else 1
        with Path(self.path).open("rb") as file:
            file.seek(offset)
            data = bytearray(file.read(size * kind.itemsize))
        return torch.frombuffer(data, dtype=kind).reshape(shape)


class FeatureCache:
    """Caches features of images by the image's hash; evicts the least recently used features."""

    def __init__(self) -> None:
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_bytes = 0

    def find(self, mark: bytes) -> Tensor | None:
        """Return features [placeholders, hidden]; None if the image is not cached."""
        if (rows := self._rows.get(mark)) is not None:
            self._rows.move_to_end(mark)
        return rows

    def keep(self, mark: bytes, rows: Tensor) -> None:
        if (known := self._rows.pop(mark, None)) is not None:
            self._num_bytes -= known.nbytes
        self._rows[mark] = rows
        self._num_bytes += rows.nbytes
        while len(self._rows) > 1 and self._num_bytes > _FEATURE_BYTES:
            self._num_bytes -= self._rows.popitem(last=False)[1].nbytes
