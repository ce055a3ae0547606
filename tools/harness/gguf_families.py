"""Writes the GGUF fields of OLMo 3, Phi-3 and Granite as llama.cpp's converter does."""

from typing import Any

import gguf


def add_own(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind == "olmo3":
        writer.add_sliding_window(config["sliding_window"])
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        rope = config["rope_parameters"]["full_attention"]
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "phi3":
        share = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(share * config["head_dim"]))
        writer.add_sliding_window(config["sliding_window"] or 0)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
