"""Writes the settings of Gemma 4 as llama.cpp's converter does."""

from typing import Any

import gguf
import numpy as np


def add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds, num_shared = config["layer_types"], config["num_kv_shared_layers"]
    local = [kind == "sliding_attention" for kind in kinds]
    (full,) = {tuple(own.items()) for own in config["per_layer_config"].values()}
    heads, kv_heads = dict(full), config["num_key_value_heads"]
    writer.add_head_count_kv(
        [kv_heads if it else heads.get("num_key_value_heads", kv_heads) for it in local]
    )
    first = len(kinds) - num_shared
    wide = [config["use_double_wide_mlp"] and layer >= first for layer in range(len(kinds))]
    writer.add_feed_forward_length([config["intermediate_size"] * (1 + it) for it in wide])
    writer.add_key_length(heads["head_dim"])
    writer.add_value_length(heads["head_dim"])
    writer.add_rope_dimension_count(heads["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(local)
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if cap := config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(cap)
    num_pairs = heads["head_dim"] // 2
    num = int(num_pairs * ropes["full_attention"]["partial_rotary_factor"])
    divisors = np.array([1.0] * num + [1e30] * (num_pairs - num), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)
