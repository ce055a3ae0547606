from pathlib import Path

import pytest
import torch

from headrace_common.checkpoints.spec import read_spec
from headrace_common.messages import Quantize
from headrace_engine.models.registry import FAMILIES
from headrace_engine.runner.footprint import Footprint, footprint
from headrace_engine.runner.lanes.choose import choose_lane
from headrace_engine.runner.lanes.lane import LaneOptions
from headrace_engine.runner.lanes.native_text import NativeText
from tests.kernels.own_kernels import ALL_SETS, needs_own_kernels
from tools.harness.tiny_models import make_tiny_image_model, make_tiny_model

CPU = torch.device("cpu")


def expected(folder: Path, dtype: torch.dtype, quantize: Quantize = "none") -> Footprint:
    return footprint(read_spec(folder), dtype, "avx512", quantize)


@needs_own_kernels
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_expected_is_what_is_held(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    folder = make_tiny_model(tmp_path, architecture, tie_word_embeddings=is_tied, vocab_size=331)
    for dtype, quantize in (
        (torch.float32, "none"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "int8"),
        (torch.float32, "int8"),
        (torch.bfloat16, "int4"),
        (torch.float32, "int4"),
    ):
        lane = NativeText(read_spec(folder), dtype, CPU, LaneOptions(quantize, ALL_SETS[0]))
        found = expected(folder, dtype, quantize)
        assert found.held == lane.weight_bytes
        assert found.held <= found.peak <= 3 * found.held


@pytest.mark.parametrize("kind", ["Qwen3.5", "Gemma3", "LLaVA"])
def test_the_vision_side_counts_in_the_lanes_that_load_it(tmp_path: Path, kind: str) -> None:
    spec = read_spec(make_tiny_image_model(tmp_path, kind))
    lane = choose_lane(spec, "auto")(spec, torch.float32, CPU, LaneOptions())
    text, whole = (
        footprint(spec, torch.float32, "plain", "none", has_encoder=has_encoder)
        for has_encoder in (False, True)
    )
    # In safetensors, only the names of Qwen3.5 tell its vision side from its text side.
    assert (text.held < whole.held) == (kind == "Qwen3.5")
    assert whole.held == whole.peak == lane.weight_bytes
