"""Pooled vectors do not depend on where a prompt is cut into chunks, to the last bit."""

import pytest
import torch

from headrace_common.sampling import Pooling, PoolingMode
from headrace_engine.runner.pooling import PooledRows, VectorHead


@pytest.mark.parametrize("mode", ["mean", "mean_sqrt_len", "weightedmean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_no_bit_of_a_vector(mode: PoolingMode, dtype: torch.dtype) -> None:
    rows = torch.randn(700, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    head = VectorHead((mode,), (), 96)

    def pooled(length: int) -> bytes | None:
        kept = PooledRows(Pooling((mode,)), head)
        for chunk in rows.split(length):
            kept.add(chunk, lambda row: row)
        return kept.vector()

    assert {pooled(length) for length in (1, 7, 64, 333)} == {pooled(700)}
