"""Pools a prompt's rows into the one vector that stands for it, however the prompt was cut."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace_common.sampling import Pooling, PoolingMode

Stage = Callable[[Tensor], Tensor]


class VectorHead:
    """A model's way from rows to vectors of `size` numbers: the modes that pool, then stages."""

    def __init__(self, modes: tuple[PoolingMode, ...], stages: Sequence[Stage], size: int) -> None:
        self.modes = modes
        self.size = size
        self._stages = tuple(stages)

    def __call__(self, pooled: Tensor) -> Tensor:
        for stage in self._stages:
            pooled = stage(pooled)
        return pooled


def to_unit(vector: Tensor) -> Tensor:
    """The vector at length 1."""
    vector = vector / vector.abs().amax()  # a large one may overflow when it is squared
    return vector / torch.linalg.vector_norm(vector)


UNIT = VectorHead(("last",), (to_unit,), 0)


class PooledRows:
    """The pooled rows of the chunks so far: of each mode a float32 sum, a maximum, or one row."""

    def __init__(self, pooling: Pooling, head: VectorHead) -> None:
        self._modes = pooling.modes
        self._head = head
        self._num_rows = 0
        self._kept: dict[PoolingMode, Tensor] = {}

    def add(self, rows: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """The rows that `Pooling.num_rows` asked for of the next chunk."""
        if not len(rows):
            return
        values, kept = rows.float(), self._kept
        for mode in self._modes:
            match mode:
                case "score":
                    kept[mode] = logits(rows[-1:])[0]
                case "last":
                    kept[mode] = values[-1]
                case "cls":
                    kept.setdefault(mode, values[0])
                case "max":
                    largest = values.amax(dim=0)
                    kept[mode] = torch.maximum(largest, kept.get(mode, largest))
                case "mean" | "mean_sqrt_len":
                    kept[mode] = kept.get(mode, 0) + values.sum(dim=0)
                case "weightedmean":
                    first = self._num_rows + 1
                    weights = torch.arange(first, first + len(values), device=values.device)
                    kept[mode] = kept.get(mode, 0) + (values * weights[:, None]).sum(dim=0)
        self._num_rows += len(rows)

    def vector(self) -> bytes | None:
        """Packed float32, as the head makes it unless it is a score; None if it is not finite."""
        parts = [self._kept[mode] / self._divisor(mode) for mode in self._modes]
        vector = torch.cat(parts).cpu()
        if self._modes != ("score",):
            vector = self._head(vector)
        return vector.numpy().tobytes() if bool(torch.isfinite(vector).all()) else None

    def _divisor(self, mode: PoolingMode) -> float:
        num = self._num_rows
        divisors = {"mean": num, "mean_sqrt_len": num**0.5, "weightedmean": num * (num + 1) / 2}
        return divisors.get(mode, 1)
