"""Tests which Granite configs are read and which are refused."""

from typing import Any

import pytest

from headrace_common.errors import ModelError
from headrace_engine.models.granite import Granite
from headrace_engine.models.granitemoehybrid import GraniteMoeHybrid

DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "shared_intermediate_size": 112,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "layer_types": ["attention", "attention"],
}


def test_a_dense_granite_4_is_read_with_the_size_of_its_shared_mlp() -> None:
    assert GraniteMoeHybrid.read(DENSE).text.mlp_size == 112


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layer_types": ["mamba", "attention"]}, "Mamba"),
        ({"layer_types": None}, "Mamba"),
        ({"num_local_experts": 8}, "experts"),
        ({"position_embedding_type": None}, "rotary"),
    ],
)
def test_other_granite_4_models_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        GraniteMoeHybrid.read(DENSE | change)


@pytest.mark.parametrize("value", ["x", 0, -1.0, None])
def test_a_multiplier_that_is_not_a_positive_number_is_corrupt(value: Any) -> None:
    with pytest.raises(ModelError, match="residual_multiplier"):
        Granite.read(DENSE | {"residual_multiplier": value})
