"""A folder that is broken in one place is refused by every lane, in words that name the place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_engine.runner.load import load_runner
from tools.harness.tiny_models import make_tiny_model

NORM = "model.norm.weight"


def config(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = load_file(path)
        change(content)
        save_file(content, path, {"format": "pt"})

    return rewrite


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def nest(folder: Path) -> None:
    header = b"[" * 200_000
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BREAKAGES = {
    "pickled": (pickle, "model_unsupported", "pytorch_model.bin"),
    "own code": (
        config(architectures=["OwnForCausalLM"], model_type="own", auto_map={"AutoModel": "x.Y"}),
        "model_unsupported",
        "code from its repository",
    ),
    "unknown architecture": (
        config(architectures=["OwnForCausalLM"], model_type="own"),
        "model_unsupported",
        "OwnForCausalLM",
    ),
    "quantized": (config(quantization_config={"quant_method": "x4"}), "model_unsupported", "x4"),
    "other number type": (
        tensors(lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})),
        "model_unsupported",
        NORM,
    ),
    "nested": (nest, "model_corrupt", "model.safetensors"),
    "truncated": (truncate, "model_corrupt", "model.safetensors"),
    "tensor missing": (tensors(lambda t: t.pop(NORM)), "model_corrupt", NORM),
    "tensor unknown": (
        tensors(lambda t: t.update({"model.other": torch.ones(2)})),
        "model_corrupt",
        "model.other",
    ),
    "tensor misshapen": (
        tensors(lambda t: t.update({NORM: torch.ones(65)})),
        "model_corrupt",
        NORM,
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "model_corrupt", "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model_corrupt", ".safetensors"),
}


@pytest.mark.parametrize("lane", ["native-text", "generic-text"])
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_folder_is_refused_and_the_place_named(
    breakage: str, lane: Any, tmp_path: Path
) -> None:
    damage, code, place = BREAKAGES[breakage]
    folder = make_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    damage(folder)
    own_code = breakage in ("own code", "unknown architecture")
    with pytest.raises(ModelError) as caught:
        load_runner(ModelConfig(device="cpu", threads=1, lane="auto" if own_code else lane), folder)
    assert caught.value.code == code and place in str(caught.value)
    assert str(tmp_path) not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {"rope_type": "no such type", "rope_theta": 1e4}},
        {"hidden_act": 2**64},
        {"hidden_act": "no such function"},
    ],
)
def test_a_config_that_transformers_cannot_use_is_named(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    config(**values)(folder)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_runner(ModelConfig(device="cpu", threads=1, lane="generic-text"), folder)
    assert caught.value.code == "model_corrupt"
    assert len(str(caught.value)) < 400
