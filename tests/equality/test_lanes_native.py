"""Each family and each of its options against transformers, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.harness.drive import (
    assert_equals_transformers,
    assert_errs_no_more_than_transformers,
    assert_neighbours_change_nothing,
    generate,
    random_prompt,
    row_logits,
    tiny_runner,
)
from tools.harness.tiny_models import GEMMA4_EXPERTS, make_tiny_model

PROMPT = random_prompt(150)
LLAMA, MISTRAL, QWEN2, QWEN3, MOE, GEMMA2, GEMMA3, GEMMA4, GPT_OSS, *LATER = NAMES = [
    f"{name}ForCausalLM"
    for name in (
        *("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3", "Gemma4", "GptOss"),
        *("SmolLM3", "Olmo2", "Olmo3", "Phi3", "Granite", "GraniteMoeHybrid"),
    )
]
SMOLLM3, OLMO2, OLMO3, PHI3, GRANITE, GRANITE4 = LATER
SEEING_GEMMA4 = "Gemma4ForConditionalGeneration"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"sliding_window": 24, "pad_token_id": 0}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
GEMMA4_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000.0,
        "factor": 2.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
OPTIONS = {
    "llama": (LLAMA, {}),
    "llama tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama with attention biases": (LLAMA, {"attention_bias": True}),
    "llama with mlp biases": (LLAMA, {"mlp_bias": True}),
    "llama with a kv head per head": (LLAMA, {"num_key_value_heads": 4}),
    "llama with one kv head": (LLAMA, {"num_key_value_heads": 1}),
    "llama with its own head size": (LLAMA, {"head_dim": 24}),
    "llama with another norm": (LLAMA, {"rms_norm_eps": 0.1}),
    "mistral without a window": (MISTRAL, {"sliding_window": None}),
    "mistral with a window": (MISTRAL, {"sliding_window": 24}),
    "qwen2": (QWEN2, {"head_dim": None}),
    "qwen2 tied": (QWEN2, {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2 with windows from a layer on": (QWEN2, {"head_dim": None, **SOME_WINDOWS}),
    "qwen2 with windows by layer": (
        QWEN2,
        {"head_dim": None, "layer_types": KINDS, **SOME_WINDOWS},
    ),
    "qwen3 tied": (QWEN3, {"tie_word_embeddings": True}),
    "qwen3 with attention biases": (QWEN3, {"attention_bias": True}),
    "qwen3 with windows from a layer on": (QWEN3, SOME_WINDOWS),
    "qwen3 with windows by layer": (QWEN3, {"layer_types": KINDS, **SOME_WINDOWS}),
    "gemma 2": (GEMMA2, WINDOW),
    "gemma 2 with its own layers and scale": (
        GEMMA2,
        WINDOW | {"layer_types": KINDS[1:] + KINDS[:1], "query_pre_attn_scalar": 7},
    ),
    "gemma 2 with hard caps": (
        GEMMA2,
        WINDOW | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "gemma 2 untied": (GEMMA2, WINDOW | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma 3": (GEMMA3, WINDOW | {"layer_types": KINDS}),
    "gemma 3 with one layer in six that sees all": (GEMMA3, WINDOW | {"num_hidden_layers": 7}),
    "gemma 3 with its own scale and head size": (
        GEMMA3,
        WINDOW | {"layer_types": KINDS, "query_pre_attn_scalar": 24, "head_dim": 32},
    ),
    "gemma 3 with a stretched rope": (
        GEMMA3,
        WINDOW | {"layer_types": KINDS, "rope_parameters": TWO_ROPES},
    ),
    "gemma 3 with a cap": (GEMMA3, WINDOW | {"final_logit_softcapping": 3.0}),
    "gemma 4 with shared keys and own inputs": (GEMMA4, {}),
    "gemma 4 with experts": (GEMMA4, GEMMA4_EXPERTS),
    "gemma 4 with experts and own inputs": (
        GEMMA4,
        GEMMA4_EXPERTS | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2},
    ),
    "gemma 4 with keys as values, as in the 31B": (
        GEMMA4,
        GEMMA4_EXPERTS | {"enable_moe_block": False, "num_experts": None},
    ),
    "gemma 4 with its own ropes": (GEMMA4, {"rope_parameters": GEMMA4_ROPES}),
    "the text side of gemma 4": (SEEING_GEMMA4, {}),
    "gemma 4 unified": ("Gemma4UnifiedForCausalLM", {}),
    "gemma 4 unified with keys as values": (
        "Gemma4UnifiedForCausalLM",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
    ),
    "smollm3": (SMOLLM3, {}),
    "smollm3 with its own layers and biases": (
        SMOLLM3,
        {"no_rope_layers": [1, 0, 0, 1, 1], "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3 with windows, untied": (
        SMOLLM3,
        {"use_sliding_window": True, "sliding_window": 24, "tie_word_embeddings": False},
    ),
    "olmo 2": (OLMO2, {}),
    "olmo 2 with biases and a kv head per head": (
        OLMO2,
        {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "olmo 3": (OLMO3, {}),
    "olmo 3 with its own layers and biases": (
        OLMO3,
        {"layer_types": KINDS, "num_hidden_layers": 3, "attention_bias": True},
    ),
    "olmo 3 with a stretched rope": (
        OLMO3,
        {
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            }
        },
    ),
    "phi-3 with a window": (PHI3, {"sliding_window": 24}),
    "phi-4": (PHI3, {"rope_parameters": {"rope_theta": 250_000.0}, "tie_word_embeddings": True}),
    "phi-4 with partly rotated heads": (
        PHI3,
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75}},
    ),
    "granite": (GRANITE, {}),
    "granite with biases": (GRANITE, {"attention_bias": True, "mlp_bias": True}),
    "granite 4 dense": (GRANITE4, {"tie_word_embeddings": True}),
    "experts": (MOE, {}),
    "experts whose weights sum to one": (MOE, {"norm_topk_prob": True, "num_experts": 9}),
    "experts on some layers": (MOE, {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "experts on all layers but one": (MOE, {"mlp_only_layers": [1], "num_experts_per_tok": 1}),
    "experts with a window on all layers": (
        MOE,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "gpt-oss": (GPT_OSS, {}),
    "gpt-oss with its own layers": (GPT_OSS, {"layer_types": KINDS, "num_experts_per_tok": 1}),
    "gpt-oss without biases of attention": (GPT_OSS, {"attention_bias": False}),
    "gpt-oss whose gates reach their clamps": (
        GPT_OSS,
        {"initializer_range": 0.5, "num_hidden_layers": 1},
    ),
    "gpt-oss with a plain rope": (
        GPT_OSS,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "num_local_experts": 8},
    ),
    "rope with another base": (LLAMA, {"rope_parameters": {"rope_theta": 500.0}}),
    "linear rope": (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic rope": (QWEN2, {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama3 rope": (LLAMA, {"rope_parameters": LLAMA3}),
    "yarn rope": (QWEN3, {"rope_parameters": YARN}),
    "yarn rope without a factor": (LLAMA, {"rope_parameters": YARN | {"factor": None}}),
    "yarn rope of qwen2": (QWEN2, {"rope_parameters": YARN}),
    "yarn rope with fractions": (QWEN3, {"rope_parameters": YARN | {"truncate": False}}),
    "yarn rope with its own amplitude": (
        MISTRAL,
        {"rope_parameters": YARN | {"attention_factor": 0.8}, "sliding_window": None},
    ),
    "yarn rope with two scales": (
        LLAMA,
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0}},
    ),
    "shards": (QWEN3, {"max_shard_size": "60KB"}),
    "tied shards": (
        QWEN2,
        {"head_dim": None, "tie_word_embeddings": True, "max_shard_size": "60KB"},
    ),
}

# `make test-slow` runs these, whose options other cases have in other families or in part.
SLOW = {
    *("llama tied", "llama with mlp biases", "llama with a kv head per head"),
    *("llama with its own head size", "llama with another norm", "mistral without a window"),
    *("qwen2 tied", "qwen2 with windows by layer", "qwen3 with attention biases"),
    *("qwen3 with windows from a layer on", "gemma 2 with its own layers and scale"),
    *("gemma 2 untied", "gemma 3", "gemma 3 with its own scale and head size"),
    *("gemma 4 with experts", "the text side of gemma 4", "gemma 4 unified"),
    *("smollm3", "olmo 2", "olmo 3", "granite", "experts", "experts on all layers but one"),
    *("experts with a window on all layers", "gpt-oss", "gpt-oss with a plain rope"),
    *("yarn rope without a factor", "yarn rope of qwen2", "yarn rope with fractions", "shards"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(it, marks=pytest.mark.slow) if it in SLOW else it for it in OPTIONS]
)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path):
    architecture, config = OPTIONS[name]
    folder = make_tiny_model(tmp_path / "tiny", architecture, **dict[str, Any](config))
    assert_equals_transformers(folder, architecture, PROMPT, 64)


@pytest.mark.parametrize("architecture", [MOE, GPT_OSS])
def test_experts_give_the_same_tokens_at_any_cap_and_beside_any_neighbour(
    architecture: str, tmp_path: Path
):
    folder = make_tiny_model(tmp_path / "tiny", architecture)
    runner = tiny_runner(folder, "native-text", block_size=16)
    whole = generate(runner, PROMPT, 40)
    for cap in (1, 4, 16, 63, 64, 65):
        assert generate(runner, PROMPT, 8, chunk=cap) == whole[:8]
    assert_neighbours_change_nothing(runner, PROMPT, whole)


@torch.inference_mode()
def test_each_expert_is_computed_once_for_all_tokens_of_a_step(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "tiny", MOE, num_hidden_layers=1)
    runner = tiny_runner(folder, "native-text")
    sizes: list[int] = []
    for expert in runner.lane._model.layers[0].mlp.experts:  # type: ignore[attr-defined]
        expert.register_forward_hook(lambda _, args, out: sizes.append(len(args[0])))
    row_logits(runner, PROMPT)
    assert len(sizes) <= 5 and sum(sizes) == 2 * len(PROMPT)


@pytest.mark.parametrize("architecture", NAMES)
def test_bfloat16_errs_no_more_than_that_of_transformers(architecture: str, tmp_path: Path):
    folder = make_tiny_model(tmp_path / "tiny", architecture, head_dim=None, dtype=torch.bfloat16)
    assert_errs_no_more_than_transformers(folder, architecture, PROMPT)
