"""Pools a prompt's rows into the one vector that stands for it, however the prompt was cut."""

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.core.sampling import Pooling


class PooledRows:
    """The pooled rows of the chunks so far: a float32 sum, or one row."""

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self._kind = pooling.kind
        self._num_tokens = num_tokens
        self._kept: Tensor | None = None

    def add(self, rows: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """The rows that `Pooling.num_rows` asked for of the next chunk."""
        if not len(rows):
            return
        if self._kind == "mean":
            total = rows.float().sum(dim=0)
            self._kept = total if self._kept is None else self._kept + total
        elif self._kind == "cls":
            self._kept = rows[0].float()
        else:
            self._kept = logits(rows[-1:])[0] if self._kind == "score" else rows[-1].float()

    def vector(self) -> bytes | None:
        """Packed float32, of length 1 unless it is a score; None if it is not finite, or 0."""
        assert self._kept is not None
        vector = self._kept.cpu()
        if self._kind == "mean":
            vector = vector / self._num_tokens
        if self._kind != "score":
            # a large one may overflow when it is squared
            vector = vector / vector.abs().amax()
            vector = vector / torch.linalg.vector_norm(vector)
        return vector.numpy().tobytes() if bool(torch.isfinite(vector).all()) else None
