"""Loading by the real road, from folders that are whole, odd or broken in one place."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headrace_common.checkpoints.spec import read_spec
from headrace_common.errors import ModelError
from headrace_common.loading import ON_LOADING
from headrace_common.messages import Loading
from headrace_engine.models.registry import family
from headrace_engine.weights.weights import LayerConverter, load_weights
from tools.harness.tiny_models import make_tiny_model

QWEN2 = {"architecture": "Qwen2ForCausalLM", "head_dim": None}
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    spec = read_spec(folder)
    make = family(spec.architecture)
    with torch.device("meta"):
        model = make(make.read(spec.config))
    load_weights(model, make.weights, spec, dtype, CPU)
    return model


def rewrite(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Replaces tensors of a one-file model, with None takes them away; `__` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def refusal(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(folder.parent) not in str(caught.value), "a message shows no path"
    return caught.value


def test_a_header_that_only_the_library_refuses_is_damage(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", **QWEN2)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    # The model does not use this buffer, so its type is not checked.
    buffer = b'{"position_ids":{"dtype":"I3","shape":[0],"data_offsets":[0,0]},'
    header = buffer + raw[9 : 8 + length]
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    error = refusal(folder)
    assert error.code == "model_corrupt"
    assert "model.safetensors of tiny is not a valid safetensors file" in str(error)


def test_queries_keys_and_values_are_stacked_in_that_order(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", **QWEN2)
    stored = load_file(folder / "model.safetensors")
    qkv = load(folder).layers[1].attention.qkv
    for kind in ("weight", "bias"):
        parts = [stored[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(getattr(qkv, kind), torch.cat(parts))


def test_weights_are_converted_to_the_type_asked_for(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    exact, coarse = load(folder), load(folder, torch.bfloat16)
    assert {p.dtype for p in coarse.parameters()} == {torch.bfloat16}
    assert torch.equal(exact.norm.weight.bfloat16(), coarse.norm.weight)
    assert coarse.rotary.frequencies.dtype == torch.float32


def test_nothing_is_left_without_memory_and_nothing_wants_a_gradient(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path / "tiny"))
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors)


def test_shards_give_the_weights_of_one_file(tmp_path: Path) -> None:
    one = load(make_tiny_model(tmp_path / "one"))
    many = load(make_tiny_model(tmp_path / "many", max_shard_size="60KB"))
    assert len(read_spec(tmp_path / "many").weight_files) > 3
    pairs = zip(one.parameters(), many.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path / "tiny", tie_word_embeddings=True))
    assert model.head.weight is model.embed.weight


def test_a_tied_head_that_is_stored_once_more_takes_no_memory(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", tie_word_embeddings=True)
    same = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    model = load(rewrite(folder, lm_head__weight=same))
    assert model.head.weight is model.embed.weight


def test_a_head_that_is_called_tied_but_differs_is_taken_as_stored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", tie_word_embeddings=True)
    other = torch.full((320, 64), 3.0)
    model = load(rewrite(folder, lm_head__weight=other))
    assert torch.equal(model.head.weight, other) and not torch.equal(model.embed.weight, other)


def test_positions_tables_of_old_exporters_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    weight = load(folder).embed.weight
    own = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(8)}
    assert torch.equal(load(rewrite(folder, **own)).embed.weight, weight)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    error = refusal(rewrite(folder, model__layers__2__mlp__up_proj__weight=None))
    assert error.code == "model_corrupt" and "model.layers.2.mlp.up_proj.weight" in str(error)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    error = refusal(rewrite(folder, model__adapter__weight=torch.ones(3)))
    assert error.code == "model_corrupt" and "model.adapter.weight" in str(error)


@pytest.mark.parametrize("shape", [(64,), (65,), (64, 1), ()])
def test_a_misshapen_tensor_is_named_with_its_shape(tmp_path: Path, shape: tuple[int]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    if shape == (64,):
        load(rewrite(folder, model__norm__weight=torch.ones(shape)))
        return
    error = refusal(rewrite(folder, model__norm__weight=torch.ones(shape)))
    assert error.code == "model_corrupt"
    assert "model.norm.weight" in str(error) and str(list(shape)) in str(error)


def test_a_part_of_a_stack_of_the_wrong_height_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    error = refusal(rewrite(folder, model__layers__0__self_attn__k_proj__weight=torch.ones(31, 64)))
    assert error.code == "model_corrupt" and "self_attn" in str(error)


@pytest.mark.parametrize("kept", [0, 5, 100, 30_000])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    error = refusal(folder)
    assert error.code == "model_corrupt" and "model.safetensors" in str(error)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    error = refusal(folder)
    assert error.code == "model_corrupt" and shard.name in str(error)


def test_values_of_a_type_that_needs_scales_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    error = refusal(rewrite(folder, model__norm__weight=torch.ones(64, dtype=torch.int8)))
    assert error.code == "model_unsupported" and "I8" in str(error)


def test_a_config_of_another_size_than_the_weights_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert "model.layers.3" in str(refusal(folder))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert "model.layers.2" in str(refusal(folder))


def test_a_load_tells_how_much_of_the_weights_there_is(tmp_path: Path) -> None:
    told: list[Loading] = []
    token = ON_LOADING.set(told.append)
    try:
        load(make_tiny_model(tmp_path / "tiny"))
    finally:
        ON_LOADING.reset(token)
    shares = [one.share for one in told]
    assert len(shares) > 5 and shares == sorted(shares)
    assert 0 < shares[0] < 1 and shares[-1] == 1


def test_a_layer_leaves_memory_as_soon_as_it_is_converted(tmp_path: Path) -> None:
    """Otherwise loading takes another layer of memory than is planned for."""
    spec = read_spec(make_tiny_model(tmp_path / "tiny"))
    make = family(spec.architecture)
    with torch.device("meta"):
        model = make(make.read(spec.config))
    stored: list[weakref.ref[nn.Parameter]] = []
    num_left: list[int] = []

    def convert(path: str, _: object) -> None:
        layer = model.get_submodule(path)
        for name, parameter in list(layer.named_parameters(recurse=False)):
            stored.append(weakref.ref(parameter))
            setattr(layer, name, nn.Parameter(torch.empty(0), requires_grad=False))

    def count(_: Loading) -> None:
        num_left.append(sum(one() is not None for one in stored))

    token = ON_LOADING.set(count)
    try:
        load_weights(model, make.weights, spec, torch.float32, CPU, LayerConverter(convert, {}))
    finally:
        ON_LOADING.reset(token)
    assert len(stored) > 5 and not any(num_left)


def test_weights_in_fp8_are_called_so_and_what_would_do_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    norm = torch.ones(32).to(torch.float8_e4m3fn)
    error = refusal(rewrite(folder, model__norm__weight=norm))
    assert error.code == "model_unsupported"
    assert "weights in fp8 (model.norm.weight is F8_E4M3)" in str(error)
    assert "in bfloat16" in str(error)
