"""gpt-oss as it is published: experts in MXFP4, blocks and scales in tensors of their own."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import SchedulerConfig
from headrace_common.errors import ModelError
from headrace_engine.runner import mapped_file
from headrace_engine.runner.footprint import footprint
from headrace_engine.weights.mxfp4 import values_of
from tests.kernels.own_kernels import OWN_SETS, needs_own_kernels
from tools.harness.drive import assert_close, naive_logits, random_prompt, row_logits, tiny_runner
from tools.harness.gpt_oss_files import gpt_oss_to_gguf, to_mxfp4
from tools.harness.tiny_models import END, make_tiny_model, speak_harmony

PROMPT = random_prompt(60)


def make(tmp_path: Path, **config: object) -> Path:
    folder = make_tiny_model(tmp_path / "tiny", "GptOssForCausalLM", **config)
    return to_mxfp4(folder)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def values_by_transformers(folder: Path) -> dict[str, Tensor]:
    """The weights under the names that transformers' model has, float32."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_blocks"):
            scales = load_file(folder / "model.safetensors")[name[:-7] + "_scales"]
            own = convert_moe_packed_tensors(tensor, scales, dtype=torch.float32)
            found[name.removesuffix("_blocks")] = own
        elif not name.endswith("_scales"):
            found[name] = tensor.float()
    return found


def test_values_are_exactly_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 64, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 255, (3, 40, 64), generator=generator).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        assert torch.equal(values_of(blocks[expert], scales[expert]), expected[expert].T)


@torch.inference_mode()
def test_a_model_is_that_of_its_unpacked_values(tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert read_spec(folder).dtype == "float32"
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config._attn_implementation = "eager"
    reference = transformers.GptOssForCausalLM(config)
    reference.load_state_dict(values_by_transformers(folder))
    expected = reference.eval()(torch.tensor([PROMPT])).logits[0]
    assert_close(naive_logits(folder, PROMPT), expected)
    assert_close(row_logits(tiny_runner(folder, "native-text"), PROMPT), expected)


@needs_own_kernels
def test_groups_stay_as_they_are_in_bfloat16_and_compute_as_plain_or_better(
    tmp_path: Path,
) -> None:
    """Whole and in chunks to the bit, in the memory that was worked out."""
    folder = make(tmp_path, dtype=torch.bfloat16, hidden_size=128, intermediate_size=256)
    runner = tiny_runner(folder)
    expert = runner.lane._model.layers[0].mlp.experts[0]  # type: ignore[attr-defined]
    assert expert.gate_up.weight.nbytes == 512 * 128 * 17 // 32  # 4 bits, and a byte of 32
    exact, plain = (
        row_logits(tiny_runner(folder, **settings), PROMPT)
        for settings in ({"dtype": "float32"}, {"kernels": "plain"})
    )
    found = row_logits(runner, PROMPT)
    assert float((found - exact).norm()) < 1.2 * float((plain - exact).norm())
    for chunk in (1, 7, 30):
        assert torch.equal(row_logits(runner, PROMPT, chunk), found)
    needed = footprint(read_spec(folder), torch.bfloat16, "avx512", "own")
    assert runner.lane.weight_bytes == needed.held <= needed.peak


@needs_own_kernels
@pytest.mark.usefixtures("own_cache")
def test_experts_that_do_not_fit_memory_lie_in_a_mapped_file_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "kind_of", lambda path: "ext4")  # also where it is memory
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 16}
    folder = make(tmp_path, dtype=torch.bfloat16, **sizes)
    whole, needed = (
        tiny_runner(folder),
        footprint(read_spec(folder), torch.bfloat16, OWN_SETS[0], "own"),
    )
    monkeypatch.setattr("headrace_engine.runner.load.free_bytes", lambda device: needed.peak - 1)
    scheduler = SchedulerConfig(max_num_seqs=1)
    mapped = tiny_runner(folder, max_model_len=64, scheduler=scheduler)
    assert mapped.lane.weight_bytes < needed.held // 2
    assert torch.equal(row_logits(mapped, PROMPT), row_logits(whole, PROMPT))


def test_scales_may_lie_in_another_file_than_their_blocks(tmp_path: Path) -> None:
    folder = make(tmp_path)
    whole = row_logits(tiny_runner(folder, dtype="float32"), PROMPT)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {
        file: {name: it for name, it in tensors.items() if name.endswith("_scales") == is_scales}
        for file, is_scales in (("a.safetensors", False), ("b.safetensors", True))
    }
    for file, part in parts.items():
        save_file(part, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(row_logits(tiny_runner(folder, dtype="float32"), PROMPT), whole)


def test_blocks_without_their_scales_are_named(tmp_path: Path) -> None:
    folder = make(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="down_proj_blocks is U8"):
        tiny_runner(folder)


def test_a_config_that_names_no_type_means_bfloat16(tmp_path: Path) -> None:
    folder = make(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": None}))
    assert read_spec(folder).dtype == "bfloat16"


def test_the_lane_of_transformers_leaves_it_alone(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="MXFP4, which only native-text supports"):
        tiny_runner(make(tmp_path), "generic-text")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_is_the_same_model_to_the_bit(tmp_path: Path, dtype: str) -> None:
    """With the same rounding of all else, and the same rope."""
    folder = make(tmp_path)
    file = gpt_oss_to_gguf(folder, tmp_path / "tiny-MXFP4.gguf", eos_token_id=END)
    found, expected = (
        row_logits(tiny_runner(it, "native-text", dtype=dtype), PROMPT)
        for it in (find_model(str(file)), folder)
    )
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("own_cache")
def test_the_ends_of_a_gguf_file_are_those_of_harmony(tmp_path: Path) -> None:
    folder = make(tmp_path)
    ids = speak_harmony(folder)
    file = gpt_oss_to_gguf(folder, tmp_path / "tiny-MXFP4.gguf", eos_token_id=ids["<|return|>"])
    ends = read_spec(find_model(str(file))).end_token_ids
    assert {ids["<|return|>"], ids["<|call|>"]} <= set(ends) and ids["<|end|>"] not in ends
