"""Adapters' files: what is read of them, and why others are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_common.checkpoints.adapters import fingerprint_of, name_adapter, read_adapter
from headrace_common.checkpoints.spec import ModelSpec, read_spec
from headrace_common.errors import ModelError
from headrace_engine.weights.adapter_weights import AdapterTensors
from headrace_engine.weights.merge import merge
from tools.harness.drive import tiny_runner
from tools.harness.gguf_files import write_file
from tools.harness.tiny_adapters import ATTENTION, MLP, make_adapter
from tools.harness.tiny_models import make_tiny_model

LLAMA = "LlamaForCausalLM"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_tiny_model(tmp_path_factory.mktemp("models") / "base", LLAMA))


def configure(folder: Path, **changed: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read_adapter(folder, LLAMA)
    return str(refused.value)


@pytest.mark.parametrize("name", ["nowhere", "a" * 5000, "a" * 5000 + ".gguf", "a\0b"])
def test_a_path_where_nothing_can_be_is_refused(name: str) -> None:
    assert "No adapter was found" in refusal(Path(name))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias: all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "LOHA"}, "of type LOHA"),
        ({"r": 7}, f"rank 4 at {Q_PROJ}, but adapter_config.json says 7"),
        ({"target_modules": ["q_proj"]}, "model.layers.0.self_attn.v_proj, which target_modules"),
        ({"target_modules": ["q_proj", "v_proj", "gate"]}, "names gate in target_modules"),
        ({"target_modules": r".*\.q_pro"}, "which target_modules does not name"),
        ({"target_modules": "("}, "not a regular expression"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changed: dict[str, Any], words: str, base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj", "v_proj"))
    configure(folder, **changed)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    "targets",
    [
        r".*\.(q|v)_proj",
        r"^(?!.*visual).*(?:q_proj|v_proj)$",
        r"^(model(?=\.).*\.(q_proj|v_proj))$",
        "all-linear",
        None,
    ],
)
def test_targets_are_endings_or_an_expression(
    targets: Any, base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj", "v_proj"))
    configure(folder, target_modules=targets)
    assert len(read_adapter(folder, LLAMA).factors) == 6


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {r"layers\.0\..*": 12}}, 3.0),
        ({"alpha_pattern": {r"layers\.1\..*": 12}}, 2.0),
    ],
)
def test_factors_are_scaled_as_the_config_says(
    config: dict[str, Any], scale: float, base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",), **config)
    assert read_adapter(folder, LLAMA).factors[Q_PROJ].scale == scale


@pytest.mark.parametrize("lost", ["lora_A", "lora_B"])
def test_a_lost_factor_is_named(lost: str, base: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[f"base_model.model.{Q_PROJ}.{lost}.weight"]
    save_file(tensors, file)
    assert f"lacks the LoRA matrix {lost[-1]} of {Q_PROJ}" in refusal(folder)


def test_other_tensors_are_refused(base: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.lm_head.weight": torch.zeros(3)}, file)
    assert "base_model.model.lm_head.weight" in refusal(folder)


def test_damage_and_absence_are_told(base: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    assert "No adapter was found" in refusal(tmp_path / "b")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert "truncated or damaged" in refusal(folder)
    file.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is not supported" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refusal(folder)


def test_the_fingerprint_stands_for_weights_and_scale(base: ModelSpec, tmp_path: Path) -> None:
    def made(name: str, **config: Any) -> str:
        folder = make_adapter(tmp_path / name, base.folder, 4, ("q_proj",), **config)
        return fingerprint_of(read_adapter(folder, LLAMA))

    first = made("a")
    assert made("b") == first
    assert len({first, made("c", seed=1), made("d", lora_alpha=3)}) == 3


@pytest.mark.parametrize(
    ("targets", "words"),
    [(("q_proj",), "64 inputs and 64 outputs at model.layers.0.self_attn.q_proj (rank 4)")],
)
def test_an_adapter_of_another_model_is_refused(
    targets: tuple[str, ...], words: str, base: ModelSpec, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", LLAMA, hidden_size=128, head_dim=32)
    adapter = name_adapter("a", make_adapter(tmp_path / "a", base.folder, 4, targets), LLAMA)
    with pytest.raises(ModelError) as refused:
        tiny_runner(other).read_adapter(adapter)
    assert words in str(refused.value)
    with pytest.raises(ModelError, match="the adapter is for another model"):
        merge(read_spec(other), Path(adapter.path), tmp_path / "out")


def test_a_merge_that_was_stopped_leaves_nothing_in_the_way_of_the_next(
    base: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    adapter, out = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",)), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("headrace_engine.weights.merge.save_file", stopped)
        with pytest.raises(KeyboardInterrupt):
            merge(base, adapter, out)
    assert not out.exists()
    assert merge(base, adapter, out) > 0


def test_layers_that_are_not_changed_here_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "experts", "Qwen3MoeForCausalLM")
    adapter = make_adapter(tmp_path / "a", folder, 4, ("experts.0.up_proj",))
    named = name_adapter("a", adapter, "Qwen3MoeForCausalLM")
    with pytest.raises(ModelError, match=r"experts\.0\.up_proj \(rank 4\)"):
        tiny_runner(folder).read_adapter(named)


def test_files_that_have_changed_since_are_refused(base: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    adapter = name_adapter("a", folder, LLAMA)
    configure(folder, lora_alpha=1)
    with pytest.raises(ModelError, match="have changed since it was loaded"):
        tiny_runner(base.folder).read_adapter(adapter)


def test_a_gguf_adapter_has_the_factors_of_the_folder(base: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ATTENTION + MLP)
    file = write_gguf(folder, base, tmp_path / "a.gguf")
    ours, theirs = read_adapter(folder, LLAMA), read_adapter(file, LLAMA)
    assert theirs.factors.keys() == ours.factors.keys()
    with AdapterTensors(ours, base) as folders, AdapterTensors(theirs, base) as files:
        for module in ours.factors:
            for left, right in zip(
                folders.read_factors(module), files.read_factors(module), strict=True
            ):
                assert torch.equal(left, right), module


@pytest.mark.parametrize(
    ("kind", "words"),
    [("model", "is not a LoRA adapter"), ("adapter", "no adapter.lora.alpha")],
)
def test_a_gguf_file_of_another_kind_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    write_file(writer)
    assert words in refusal(tmp_path / "x.gguf")


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, base: ModelSpec, file: Path) -> Path:
    """As llama.cpp's convert_lora_to_gguf.py does it for a Llama: rows of q and k in turn."""
    config = json.loads((folder / "adapter_config.json").read_text())
    heads = {"q_proj": base.config["num_attention_heads"]}
    heads["k_proj"] = base.config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        parts = name.split(".")
        layer, module, factor = parts[4], ".".join(parts[5:7]), parts[7]
        if factor == "lora_B" and parts[6] in heads:
            rows = tensor.reshape(heads[parts[6]], 2, -1, tensor.shape[1])
            tensor = rows.swapaxes(1, 2).reshape(tensor.shape)
        own = f"blk.{layer}.{GGUF_NAMES[module]}.weight.{factor.lower()}"
        writer.add_tensor(own, tensor.contiguous().numpy())
    write_file(writer)
    return file


BOMB = "((([a-z_0-9.])+)+)+X"


@pytest.mark.parametrize(
    "changed",
    [
        {"target_modules": BOMB},
        {"rank_pattern": {BOMB: 4}},
        {"alpha_pattern": {"v_proj": 1, BOMB: 4}},
        {"target_modules": "(?:" * 5 + ".*" + "){0,9999}" * 5 + "X"},
    ],
)
def test_an_expression_that_never_ends_is_refused(
    changed: dict[str, Any], base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    configure(folder, **changed)
    assert "adapter_config.json take too long to match" in refusal(folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank_pattern": ["x"]}, "rank_pattern in adapter_config.json of a is not an object"),
        ({"alpha_pattern": "x"}, "alpha_pattern in adapter_config.json of a is not an object"),
        ({"alpha_pattern": {"q_proj": [1]}}, "has lora_alpha a list for"),
        ({"alpha_pattern": {"(": 1}}, "is not a regular expression"),
        ({"alpha_pattern": {"a{99999999999999}": 1}}, "is not a regular expression"),
        ({"alpha_pattern": {"(" * 5000 + ")" * 5000: 1}}, "in adapter_config.json"),
        ({"lora_alpha": 10**400}, "has lora_alpha 10000000000000000000… for"),
        ({"lora_alpha": 10**400}, "it must be a number"),
        ({"lora_alpha": True}, "has lora_alpha True"),
        ({"lora_alpha": "x"}, "has lora_alpha x"),
        ({"lora_alpha": float("nan")}, "has lora_alpha nan"),
        ({"lora_alpha": None}, "has lora_alpha None"),
        ({"r": 0}, "says 0"),
        ({"r": -1}, "says -1"),
        ({"r": 1.5}, "says 1.5"),
        ({"r": True}, "has r True"),
        ({"r": 10**9}, "says 1e+09"),
        ({"r": 10**400, "use_rslora": True}, "it must be a number"),
        ({"use_rslora": "yes"}, "neither true nor false"),
        ({"target_modules": {"q_proj": 1}}, "neither a list of names nor a regular expression"),
        ({"target_modules": ["q_proj", 1]}, "neither a list of names nor a regular expression"),
        ({"bias": "x" * 100_000}, "bias"),
        ({"peft_type": "LO\nHA"}, "of type LO?HA"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(
    changed: dict[str, Any], words: str, base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    configure(folder, **changed)
    message = refusal(folder)
    assert words in message and len(message) < 400


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[]", "is not an object"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"r":' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b" " * (2 << 20), "has more than 1,048,576 bytes"),
    ],
)
def test_a_config_that_is_none_is_refused(
    raw: bytes, words: str, base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    (folder / "adapter_config.json").write_bytes(raw)
    assert words in refusal(folder)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_pipe, link_to_zeros, link_to_itself, Path.mkdir])
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_not_a_file_is_not_opened(
    make: Callable[[Path], None], file: str, base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    (folder / file).unlink()
    make(folder / file)
    assert f"has no {file}" in refusal(folder)


def test_more_weights_than_are_read_are_refused(base: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)
    assert "the limit is 17,179,869,184" in refusal(folder)


@pytest.mark.parametrize("path", ["~nosuchuser/x", "~a\0b/x", "~nosuchuser/x.gguf"])
def test_the_home_of_an_unknown_user_is_refused(path: str) -> None:
    assert "No adapter was found at ~" in refusal(Path(path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_cannot_be_computed_are_refused_at_the_load(
    value: float, base: ModelSpec, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{Q_PROJ}.lora_A.weight"][1, 2] = value
    save_file(tensors, file)
    adapter = name_adapter("a", folder, LLAMA)
    with pytest.raises(ModelError, match=f"The adapter a changes a weight of {Q_PROJ} by up to"):
        tiny_runner(base.folder).read_adapter(adapter)


def test_a_scale_that_makes_values_infinite_is_refused(base: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base.folder, 4, ("q_proj",), lora_alpha=1e308)
    with pytest.raises(ModelError, match="by up to inf"):
        tiny_runner(base.folder).read_adapter(name_adapter("a", folder, LLAMA))
