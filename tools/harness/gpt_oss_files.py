"""Makes folders and GGUF files of tiny gpt-oss models, in the layout of the published models."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.harness.gguf_files import add_tokenizer, write_file

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def to_mxfp4(folder: Path) -> Path:
    """Rounds the experts of a folder of make_tiny_model to MXFP4 in place; returns the folder."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        matrices = tensors.pop(name).transpose(1, 2).float()  # [experts, outputs, inputs]
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = _rounded(matrices)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _rounded(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [experts, outputs, groups, 16] and scales. A byte has two adjacent values."""
    raw = quantize(matrices.contiguous().numpy(), Kind.MXFP4)
    groups = raw.reshape(*matrices.shape[:2], -1, 17)
    # In GGUF, a byte has the values n and n + 16.
    scales, halves = groups[..., 0], groups[..., 1:]
    codes = np.concatenate((halves & 15, halves >> 4), axis=-1)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.from_numpy(blocks.copy()), torch.from_numpy(scales.copy())


def gpt_oss_to_gguf(folder: Path, target: Path, **fields: Any) -> Path:
    """Writes a folder of to_mxfp4 or make_tiny_model as one GGUF file.

    Experts in MXFP4 keep the same bits; everything else is float32.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "gpt-oss")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), fields)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if not name.endswith("_scales"):
            scales = weights.get(name.removesuffix("_blocks") + "_scales")
            _add(writer, name.removeprefix("model."), tensor, scales)
    write_file(writer)
    return target


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, scales: Tensor | None) -> None:
    found = re.fullmatch(r"(?:layers\.(\d+)\.)?([\w.]+?)(_blocks|_bias|\.weight|\.bias)?", name)
    assert found
    layer, stem, kind = found.groups()
    # The matrices of experts are stored transposed.
    if kind is None and stem.endswith("_proj"):
        tensor, kind = tensor.transpose(1, 2), ".weight"
    prefix = f"blk.{layer}." if layer else ""
    end = "bias" if kind and kind.endswith("bias") else "weight"
    if stem == "lm_head":
        writer.add_tensor("output.weight", tensor.float().numpy())
    elif stem.endswith("sinks"):
        writer.add_tensor(f"{prefix}attn_sinks.weight", tensor.float().numpy())
    elif stem.endswith("gate_up_proj"):
        for part, own in enumerate(("gate_proj", "up_proj")):
            rows = slice(part, None, 2)
            half = None if scales is None else scales[:, rows]
            own_name = f"layers.{layer}.{stem.replace('gate_up_proj', own)}{kind}"
            _add(writer, own_name, tensor[:, rows], half)
    elif scales is None:
        values = tensor.contiguous().float().numpy()
        writer.add_tensor(f"{prefix}{_NAMES[stem]}.{end}", values)
    else:
        raw = _interleaved(tensor.numpy(), scales.numpy())
        writer.add_tensor(f"{prefix}{_NAMES[stem]}.{end}", raw, raw_dtype=Kind.MXFP4)


def _interleaved(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return llama.cpp's bytes [experts, outputs, bytes]; a scale precedes its 32 values."""
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:3], 32)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate((scales[..., None], halves), axis=-1).reshape(*blocks.shape[:2], -1)
