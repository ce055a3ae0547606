"""Images as they reach a lane that sees: where their tensors lie, and their cached features."""

from collections import OrderedDict
from pathlib import Path

import msgspec
import torch
from torch import Tensor

_FEATURE_BYTES = 256 << 20  # of images that were seen lately


class ImageTensors(msgspec.Struct, frozen=True):
    """The places of one image's tensors in a file: name, dtype, shape, offset.

    `positions` are those of the whole prompt, on three axes, if the model has them.
    """

    path: str
    num_rows: int  # placeholders that it stands for
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
    """Rows of images that were seen, by mark; the one that was not asked for longest goes first."""

    def __init__(self) -> None:
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_bytes = 0

    def find(self, mark: bytes) -> Tensor | None:
        """Rows [placeholders, hidden]."""
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
