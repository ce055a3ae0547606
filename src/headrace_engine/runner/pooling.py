"""Pools the rows of a prompt into one vector, with the same result for any division into chunks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace_common.sampling import Pooling, PoolingMode

Stage = Callable[[Tensor], Tensor]


class VectorHead:
    """Runs the stages that turn rows, pooled in `modes`, into a vector of `size` numbers."""

    def __init__(self, modes: tuple[PoolingMode, ...], stages: Sequence[Stage], size: int) -> None:
        self.modes = modes
        self.size = size
        self._stages = tuple(stages)

    def __call__(self, pooled: Tensor) -> Tensor:
        for stage in self._stages:
            pooled = stage(pooled)
        return pooled


def normalize(vector: Tensor) -> Tensor:
    """Scale a vector to length 1."""
    # Squaring a large number could overflow, so divide by the largest number first.
    vector = vector / vector.abs().amax()
    return vector / torch.linalg.vector_norm(vector)


UNIT = VectorHead(("last",), (normalize,), 0)


class PooledRows:
    """Holds the pooled rows so far: a sum, a maximum or one row for each mode.

    Sums are float64, so cutting a prompt into other chunks hardly ever changes the float32 vector.
    """

    def __init__(self, pooling: Pooling, head: VectorHead) -> None:
        self._modes = pooling.modes
        self._head = head
        self._num_rows = 0
        self._pooled: dict[PoolingMode, Tensor] = {}

    def add(self, rows: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """Add the rows of the next chunk; `Pooling.num_rows` determines the number of rows."""
        if not len(rows):
            return
        values, pooled = rows.float(), self._pooled
        for mode in self._modes:
            match mode:
                case "score":
                    pooled[mode] = logits(rows[-1:])[0]
                case "last":
                    pooled[mode] = values[-1]
                case "cls":
                    pooled.setdefault(mode, values[0])
                case "max":
                    largest = values.amax(dim=0)
                    pooled[mode] = torch.maximum(largest, pooled.get(mode, largest))
                case "mean" | "mean_sqrt_len":
                    pooled[mode] = pooled.get(mode, 0) + values.sum(dim=0, dtype=torch.float64)
                case "weightedmean":
                    first = self._num_rows + 1
                    weights = torch.arange(first, first + len(values), device=values.device)
                    weighted = values.double() * weights[:, None]
                    pooled[mode] = pooled.get(mode, 0) + weighted.sum(dim=0)
        self._num_rows += len(rows)

    def vector(self) -> bytes | None:
        """Return the vector, or the score without the head, as packed float32.

        Returns None if a value is not finite.
        """
        parts = [self._pooled[mode] / self._divisor(mode) for mode in self._modes]
        vector = torch.cat([part.float() for part in parts]).cpu()
        if self._modes != ("score",):
            vector = self._head(vector)
        return vector.numpy().tobytes() if bool(torch.isfinite(vector).all()) else None

    def _divisor(self, mode: PoolingMode) -> float:
        num = self._num_rows
        divisors = {"mean": num, "mean_sqrt_len": num**0.5, "weightedmean": num * (num + 1) / 2}
        return divisors.get(mode, 1)
