"""Reorders tensors of hybrid models as llama.cpp's converter does."""

from typing import Any

import gguf
import numpy as np

IN_FULL = ("conv1d", "shared_expert_gate", "mlp.gate", "router.proj")
"""The last parts of the names of tensors that stay in float32."""


def add_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    name, kinds = writer.arch, config["layer_types"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_array(
        f"{name}.attention.recurrent_layers", [kind == "linear_attention" for kind in kinds]
    )
    turned = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    writer.add_rope_dimension_count(turned)
    if name.startswith("qwen35"):
        writer.add_rope_dimension_sections([turned // 2 - 2, 1, 1, 0])
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)


def file_rows(key: str, config: dict[str, Any], num: int) -> np.ndarray:
    """Return the number of the original row for each row of the file."""
    heads, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"]
    share, width = values // heads, config["linear_value_head_dim"]
    rows = np.arange(num)
    # Qwen3-Next stores this tensor head by head.
    if "in_proj_qkvz" in key:
        cuts = np.cumsum([dim, dim, share * width])
        parts = np.split(rows.reshape(heads, -1), cuts, axis=1)
        return np.concatenate([part.reshape(-1) for part in parts])
    if config["model_type"] == "qwen3_next" or not _by_value_head(key):
        return rows
    first = 2 * heads * dim if "in_proj_qkv." in key or "conv1d" in key else 0
    tail = rows[first:].reshape(heads, share, -1).swapaxes(0, 1).reshape(-1)
    return np.concatenate([rows[:first], tail])


def file_columns(key: str, config: dict[str, Any], num: int) -> np.ndarray:
    columns = np.arange(num)
    if config["model_type"] == "qwen3_next" or not key.endswith("linear_attn.out_proj.weight"):
        return columns
    heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return columns.reshape(heads, values // heads, -1).swapaxes(0, 1).reshape(-1)


def _by_value_head(key: str) -> bool:
    ends = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")
    return key.endswith((*ends, "conv1d.weight", "A_log", "dt_bias"))
