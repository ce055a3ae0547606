from pathlib import Path

import pytest
import torch

from headrace.checkpoints.spec import read_spec
from headrace.models.registry import FAMILIES
from headrace.runner.footprint import Footprint, footprint
from headrace.runner.lanes.native_text import NativeText
from tests.builders import make_tiny_model

CPU = torch.device("cpu")


def expected(folder: Path, dtype: torch.dtype, to_int8: bool = False) -> Footprint:
    return footprint(read_spec(folder), dtype, "avx512", to_int8)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_expected_is_what_is_held(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    folder = make_tiny_model(tmp_path, architecture, tie_word_embeddings=is_tied, vocab_size=331)
    for dtype, to_int8 in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float32, True),
    ):
        lane = NativeText(read_spec(folder), dtype, CPU, to_int8)
        found = expected(folder, dtype, to_int8)
        assert found.held == lane.weight_bytes
        assert found.held <= found.peak <= 3 * found.held
