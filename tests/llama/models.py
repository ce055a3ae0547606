"""GGUF files of tiny models with random weights that only llama.cpp runs."""

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tools.harness.gguf_files import add_merge, add_tokenizer, to_gguf, write_file
from tools.harness.gpt_oss_files import gpt_oss_to_gguf, to_mxfp4
from tools.harness.tiny_models import CHAT_TEMPLATE, END, make_tiny_model

VOCAB = 260
_HIDDEN, _HEADS, _KV, _DIM, _FF, _LAYERS = 64, 4, 2, 16, 96, 3
_EXPERTS = 4
_INNER, _STATE, _RANK, _CONV = 128, 8, 4, 4

ARCHITECTURES = ("gemma2", "mixtral", "mamba")
"""Architectures of the tests, which request the lane since we also implement Gemma 2 ourselves.

In llama.cpp, Mixtral is the architecture llama with experts."""


def write_model(path: Path, architecture: str, **fields: Any) -> Path:
    """Write a GGUF file with random weights; `fields` are added to the tokenizer's fields."""
    writer = gguf.GGUFWriter(path, architecture.replace("mixtral", "llama"))
    writer.add_context_length(2048)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_layer_norm_rms_eps(1e-6)
    _tokenizer(writer, fields)
    generator = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, _HIDDEN), "output_norm.weight": (_HIDDEN,)}
    own = _mamba(writer) if architecture == "mamba" else _attending(writer, architecture)
    for layer in range(_LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        values = generator.normal(0, 0.2, shape)
        if "norm" in name:
            values += 1
        elif name.endswith("ssm_a"):
            values = -np.exp(values)
        writer.add_tensor(name, values.astype(np.float32))
    write_file(writer)
    return path


def write_hybrid(folder: Path, architecture: str) -> Path:
    """Write a tiny transformers model as a float32 GGUF file."""
    made = make_tiny_model(
        folder / "tiny",
        architecture,
        vocab_size=VOCAB,
        linear_key_head_dim=64,  # llama.cpp requires the width of values
        moe_intermediate_size=64,
    )
    assert add_merge(made) == VOCAB
    fields = {"chat_template": CHAT_TEMPLATE, "eos_token_id": END}
    return to_gguf(made, folder / "tiny-F32.gguf", "F32", **fields)


def _tokenizer(writer: gguf.GGUFWriter, fields: dict[str, Any]) -> None:
    given = {"chat_template": CHAT_TEMPLATE, "eos_token_id": END} | fields
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_model(Path(name), num_hidden_layers=1)
        assert add_merge(folder) == VOCAB
        add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), given)


def _attending(writer: gguf.GGUFWriter, architecture: str) -> dict[str, tuple[int, ...]]:
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV)
    writer.add_key_length(_DIM)
    writer.add_value_length(_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_feed_forward_length(_FF)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (_HIDDEN,),
        "attn_q.weight": (_HEADS * _DIM, _HIDDEN),
        "attn_k.weight": (_KV * _DIM, _HIDDEN),
        "attn_v.weight": (_KV * _DIM, _HIDDEN),
        "attn_output.weight": (_HIDDEN, _HEADS * _DIM),
        "ffn_norm.weight": (_HIDDEN,),
    }
    if architecture in ("mixtral", "qwen3moe"):
        writer.add_expert_count(_EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(_FF)
        norms = {f"attn_{name}_norm.weight": (_DIM,) for name in "qk"}
        return (
            (norms if architecture == "qwen3moe" else {})
            | shapes
            | {
                "ffn_gate_inp.weight": (_EXPERTS, _HIDDEN),
                "ffn_gate_exps.weight": (_EXPERTS, _FF, _HIDDEN),
                "ffn_up_exps.weight": (_EXPERTS, _FF, _HIDDEN),
                "ffn_down_exps.weight": (_EXPERTS, _HIDDEN, _FF),
            }
        )
    writer.add_sliding_window(24)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    return shapes | {
        "post_attention_norm.weight": (_HIDDEN,),
        "ffn_gate.weight": (_FF, _HIDDEN),
        "ffn_up.weight": (_FF, _HIDDEN),
        "ffn_down.weight": (_HIDDEN, _FF),
        "post_ffw_norm.weight": (_HIDDEN,),
    }


def _mamba(writer: gguf.GGUFWriter) -> dict[str, tuple[int, ...]]:
    writer.add_head_count(0)
    writer.add_feed_forward_length(0)
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_RANK)
    return {
        "attn_norm.weight": (_HIDDEN,),
        "ssm_in.weight": (2 * _INNER, _HIDDEN),
        "ssm_conv1d.weight": (_INNER, _CONV),
        "ssm_conv1d.bias": (_INNER,),
        "ssm_x.weight": (_RANK + 2 * _STATE, _INNER),
        "ssm_dt.weight": (_INNER, _RANK),
        "ssm_dt.bias": (_INNER,),
        "ssm_a": (_INNER, _STATE),
        "ssm_d": (_INNER,),
        "ssm_out.weight": (_HIDDEN, _INNER),
    }


def write_gpt_oss(folder: Path, is_mxfp4: bool) -> Path:
    """Write a tiny gpt-oss with float32 or MXFP4 experts.

    It has no YaRN scaling, whose ramp llama.cpp rounds.
    """
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    more = {"vocab_size": VOCAB, "rope_parameters": rope, "hidden_size": 96, "head_dim": 32}
    tiny = make_tiny_model(folder / "tiny", "GptOssForCausalLM", **more)
    assert add_merge(tiny) == VOCAB
    fields = {"chat_template": CHAT_TEMPLATE, "eos_token_id": END}
    source = to_mxfp4(tiny) if is_mxfp4 else tiny
    return gpt_oss_to_gguf(source, folder / "tiny-oss.gguf", **fields)
