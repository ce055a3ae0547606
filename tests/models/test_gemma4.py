"""Gemma 4: the layers that hold keys and values, published files and configs, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_common.cache import LayerCache
from headrace_common.checkpoints.spec import read_spec
from headrace_common.errors import ModelError
from headrace_engine.models.gemma4 import Gemma4
from headrace_engine.runner.lanes.native_text import NativeText
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import random_prompt, row_logits, tiny_runner
from tools.harness.tiny_models import GEMMA4_EXPERTS, make_tiny_model

PROMPT = random_prompt(40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gemma4") / "tiny", "Gemma4ForCausalLM")


@pytest.fixture
def config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def test_layers_that_share_another_layers_kv_cache_have_none_of_their_own(folder: Path) -> None:
    local, full = LayerCache(2, 16, 16, 24), LayerCache(2, 32, 32)
    assert NativeText.cache_of(read_spec(folder)) == (local, full) * 2 + (LayerCache(),) * 2
    storage = tiny_runner(folder).lane._storage  # type: ignore[attr-defined]
    assert [len(keys.flatten()) > 0 for keys in storage.keys] == [True] * 4 + [False] * 2


def test_key_weights_of_layers_that_share_a_kv_cache_are_ignored(
    folder: Path, tmp_path: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        weights[f"model.layers.4.self_attn.{name}.weight"] = torch.ones(32, 64)
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text((folder / file).read_text())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = row_logits(tiny_runner(folder), PROMPT)
    assert torch.equal(row_logits(tiny_runner(tmp_path), PROMPT), expected)


def test_a_published_config_needs_no_per_layer_config(config: dict[str, Any]) -> None:
    del config["per_layer_config"]
    published = config | {"global_head_dim": 32, "num_global_key_value_heads": 1}
    read = Gemma4.read(published)
    assert (read.full.head_dim, read.full.num_kv_heads) == (32, 2)
    assert (read.local.head_dim, read.local.num_kv_heads) == (16, 2)
    read = Gemma4.read(published | {"attention_k_eq_v": True})
    assert (read.full.head_dim, read.full.num_kv_heads) == (32, 1)
    assert Gemma4.read({"text_config": published}) == Gemma4.read(published)


def test_layer_numbers_in_a_config_may_have_leading_zeros(config: dict[str, Any]) -> None:
    padded = {f"{int(layer):03}": own for layer, own in config["per_layer_config"].items()}
    assert Gemma4.read(config | {"per_layer_config": padded}) == Gemma4.read(config)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_bidirectional_attention": "all"}, "Bidirectional"),
        ({"hidden_activation": "silu"}, "Activation silu"),
        ({"num_kv_shared_layers": 5}, "shares keys and values of 5 of 6 layers"),
        ({"num_kv_shared_layers": 6}, "shares keys and values of 6 of 6 layers"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "different heads"),
        ({"enable_moe_block": True}, "num_experts"),
    ],
)
def test_unsupported_gemma_4_configs_are_refused(
    config: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        Gemma4.read(config | changes)


@needs_own_kernels
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("form", [{}, GEMMA4_EXPERTS], ids=["dense", "experts"])
def test_logits_do_not_depend_on_chunking_and_small_steps_are_replayed(
    tmp_path: Path, form: dict[str, Any], quantize: str
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "Gemma4ForCausalLM", dtype=torch.bfloat16, **form)
    runner = tiny_runner(folder, quantize=quantize, block_size=32)
    whole = row_logits(runner, PROMPT)
    for cut in (1, 7, 33):
        assert torch.equal(row_logits(runner, PROMPT, cut), whole)
    hidden = runner.lane._hidden  # type: ignore[attr-defined]
    assert hidden._captured is not None
