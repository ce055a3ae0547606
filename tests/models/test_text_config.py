from typing import Any

import pytest

from headrace_common.errors import ModelError
from headrace_engine.models.registry import FAMILIES, family
from headrace_engine.models.text_config import layer_windows, read_text_config

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
OWN: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 96,
    }
}
"""Config fields that an architecture needs besides CONFIG and EXPERTS."""


def read(**config: Any):
    return read_text_config(CONFIG | config, (None,) * 3)


def test_missing_fields_of_an_old_config_are_derived_from_the_others() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.is_tied) == (4, 16, False)
    assert (config.rope.theta, config.rope.kind) == (10_000.0, "default")


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ],
)
def test_all_three_spellings_of_rope_mean_the_same(config: dict[str, Any]) -> None:
    rope = read(**config).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_positions) == ("linear", 500, 2, 512)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "0.5"),
    ],
)
def test_an_unimplemented_config_feature_is_refused_by_name(
    config: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        read(**config)
    assert caught.value.code == "model_unsupported"


@pytest.mark.parametrize("key", sorted(CONFIG.keys() - {"num_hidden_layers"}))
@pytest.mark.parametrize("value", [None, 0, "64", 6.5])
def test_a_size_that_is_missing_or_none_is_corrupt(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key) as caught:
        read(**{key: value})
    assert caught.value.code == "model_corrupt"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_reads_a_plain_config(architecture: str) -> None:
    config = CONFIG | EXPERTS | {"num_hidden_layers": 4} | OWN.get(architecture, {})
    assert family(architecture).read(config).num_layers == 4


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_refuses_a_config_without_the_number_of_layers(architecture: str) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        own = OWN.get(architecture, {})
        family(architecture).read(CONFIG | EXPERTS | own | {"num_hidden_layers": None})


def test_layer_types_take_precedence_over_max_window_layers() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert layer_windows(CONFIG | {"layer_types": kinds}, 8) == (None, 8, None)
    assert layer_windows(CONFIG | {"max_window_layers": 1}, 8) == (None, 8, 8)
    assert layer_windows(CONFIG | {"max_window_layers": 1}, None) == (None, None, None)


def test_layer_types_must_be_as_many_as_layers() -> None:
    with pytest.raises(ModelError, match="2 layer_types for 3 layers") as caught:
        layer_windows(CONFIG | {"layer_types": ["full_attention"] * 2}, 8)
    assert caught.value.code == "model_corrupt"


def test_a_stretched_rope_without_its_factor_is_corrupt() -> None:
    with pytest.raises(ModelError, match="no factor for linear rope") as caught:
        read(rope_scaling={"type": "linear"})
    assert caught.value.code == "model_corrupt"


def test_yarn_without_a_factor_stretches_the_original_context_to_the_whole() -> None:
    yarn = {"type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    assert read(rope_scaling=yarn).rope.factor == 4.0
