"""Tests the settings of some families that GGUF files state in other fields."""

from typing import Any

import pytest

from headrace_common.checkpoints.gguf_families import own_settings
from headrace_common.checkpoints.gguf_header import GgufHeader
from headrace_common.errors import ModelError
from headrace_engine.models.gemma3 import Gemma3

LAYERS = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4}


def settings_of(
    architecture: str, fields: dict[str, Any], tensors: dict[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    own = {f"{architecture}.{name}": value for name, value in fields.items()}
    header = GgufHeader({"general.architecture": architecture} | own, tensors or {})
    return own_settings(header, LAYERS | config)


def test_a_phi_file_states_how_much_of_a_head_rotates_and_zero_for_no_window() -> None:
    found = settings_of("phi3", {"rope.dimension_count": 12}, sliding_window=0)
    assert found == {"partial_rotary_factor": 0.75, "sliding_window": None}
    assert settings_of("phi3", {}, sliding_window=24) == {
        "partial_rotary_factor": 1.0,
        "sliding_window": 24,
    }


def test_longrope_is_left_to_llama_cpp() -> None:
    with pytest.raises(ModelError, match="Longrope"):
        settings_of("phi3", {}, {"rope_factors_long.weight": None})


def test_an_olmo_file_with_a_window_is_an_olmo_3() -> None:
    assert settings_of("olmo2", {}) == {"sliding_window": None}
    by_layer = [True, False, True, True, False]
    found = settings_of("olmo2", {}, sliding_window=24, sliding_window_pattern=by_layer)
    assert found["architectures"] == ["Olmo3ForCausalLM"]
    assert [kind == "sliding_attention" for kind in found["layer_types"]] == by_layer
    found = settings_of("olmo2", {}, sliding_window=24)
    assert [kind[:4] for kind in found["layer_types"]] == ["slid", "slid", "slid", "full", "slid"]


def test_the_files_of_granite_4_list_heads_by_layer() -> None:
    assert settings_of("granite", {}, num_key_value_heads=2) == {}
    assert settings_of("granite", {}, num_key_value_heads=[2] * 5) == {"num_key_value_heads": 2}
    with pytest.raises(ModelError, match="numbers of heads"):
        settings_of("granite", {}, num_key_value_heads=[2, 0, 2, 2, 2])


def test_granite_without_rotary_positions_is_left_to_llama_cpp() -> None:
    with pytest.raises(ModelError, match="rotary"):
        settings_of("granite", {"rope.scaling.finetuned": False})


def test_a_gemma_3_file_without_a_window_has_no_windowed_layer() -> None:
    config = LAYERS | {"intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 2048}
    by_layer = [True, False, True, True, False]
    for stated, windows in (
        ({}, (None,) * 5),
        ({"sliding_window": 24}, (24,) * 5),
        ({"sliding_window": 24, "sliding_window_pattern": 2}, (24, None, 24, None, 24)),
        ({"sliding_window": 24, "sliding_window_pattern": by_layer}, (24, None, 24, 24, None)),
    ):
        found = config | stated | settings_of("gemma3", {}, **stated)
        assert Gemma3.read(found).text.windows == windows
