from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_engine.runner.lanes.lane import LaneOptions
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.load import load_runner
from headrace_kernels import choose_instructions
from tests.kernels.own_kernels import ALL_SETS, needs_own_kernels, rounded
from tools.harness.drive import assert_close, generate, random_prompt, row_logits, tiny_runner
from tools.harness.tiny_models import make_tiny_model

TEXT = "The water runs over the wheel, and the wheel turns the stone. What is two plus three? " * 4
CPU = torch.device("cpu")


def test_fast_layers_and_plain_ones_generate_the_same_in_float32(
    tmp_path: Path,
) -> None:
    folder, prompt = make_tiny_model(tmp_path), random_prompt(90)
    fast = generate(tiny_runner(folder), prompt, 24, 33)
    assert generate(tiny_runner(folder, kernels="plain"), prompt, 24, 33) == fast


@pytest.mark.parametrize("chunk", [7, 90])
def test_fast_logits_in_bfloat16_are_as_near_to_float32_as_plain_ones(
    tmp_path: Path, chunk: int
) -> None:
    folder, prompt = make_tiny_model(tmp_path, initializer_range=0.1), random_prompt(90)
    exact = row_logits(tiny_runner(folder), prompt)
    fast = row_logits(tiny_runner(folder, dtype="bfloat16"), prompt, chunk)
    plain = row_logits(tiny_runner(folder, dtype="bfloat16", kernels="plain"), prompt, chunk)
    assert float((fast - exact).norm()) < 1.5 * float((plain - exact).norm()) + 1e-3


@needs_own_kernels
def test_int8_keeps_the_logits_and_halves_the_linear_weights(tmp_path: Path) -> None:
    folder, prompt = make_tiny_model(tmp_path, initializer_range=0.1), random_prompt(40)
    exact = row_logits(tiny_runner(folder), prompt)
    found = row_logits(tiny_runner(folder, quantize="int8"), prompt)
    assert float((found - exact).norm() / exact.norm()) < 0.05
    spec = read_spec(folder)
    plain = NativeText(spec, torch.bfloat16, CPU, LaneOptions("none", ALL_SETS[0]))
    packed = NativeText(spec, torch.bfloat16, CPU, LaneOptions("int8", ALL_SETS[0]))
    assert packed.num_parameters == plain.num_parameters
    assert packed.weight_bytes < 0.8 * plain.weight_bytes


@needs_own_kernels
def test_int4_computes_the_model_whose_weights_are_rounded_the_head_to_8_bits(
    tmp_path: Path,
) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    folder, prompt = make_tiny_model(tmp_path, **shape), random_prompt(40)
    runner = tiny_runner(folder, quantize="int4")
    found = row_logits(runner, prompt)
    assert torch.equal(row_logits(runner, prompt, 7), found)
    packed = tiny_runner(folder, quantize="int4", dtype="bfloat16").lane
    plain = tiny_runner(folder, dtype="bfloat16").lane
    embed = plain._model.embed.weight.nbytes
    assert packed.weight_bytes - embed < 0.4 * (plain.weight_bytes - embed)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name == "lm_head.weight":
            weights[name] = rounded(weight, "int8")
        elif weight.ndim == 2 and "embed" not in name:
            weights[name] = rounded(weight, "int4")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    # On AVX2 the inputs of a product are rounded to 8 bits, in every layer.
    tolerance = 6e-2 if choose_instructions("auto", torch.float32)[0] == "avx2" else 2e-3
    assert_close(found, row_logits(tiny_runner(folder), prompt), tolerance=tolerance)


@needs_own_kernels
def test_int4_costs_a_trained_model_little_of_its_certainty() -> None:
    folder = find_model("headrace-mini")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    losses = {
        kind: float(cross_entropy(row_logits(tiny_runner(folder, quantize=kind), ids)[:-1], ids))
        for kind in ("none", "int4")
    }
    print("nats a token:", losses)
    assert 0 < abs(losses["int4"] - losses["none"]) < 0.05 * losses["none"]


def cross_entropy(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))


@needs_own_kernels
def test_int8_has_a_fingerprint_of_its_own_and_is_refused_where_it_is_not_built(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path)
    plain, packed = (
        load_runner(ModelConfig(quantize=kind, device="cpu", threads=1), folder)[1]
        for kind in ("none", "int8")
    )
    assert plain.fingerprint != packed.fingerprint
    with pytest.raises(ModelError, match="a native lane"):
        load_runner(ModelConfig(quantize="int8", lane="generic-text", device="cpu"), folder)


def test_a_tied_head_takes_one_packed_copy(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    spec = read_spec(folder)
    lane = NativeText(spec, torch.bfloat16, CPU, LaneOptions("none", ALL_SETS[0]))
    head = 2 * spec.config["vocab_size"] * spec.config["hidden_size"]
    scales_and_norms = 0.05 * lane.num_parameters
    assert lane.weight_bytes <= 2 * lane.num_parameters + head + 4 * scales_and_norms
