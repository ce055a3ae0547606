"""Writes the shipped files: Qwen3's config, tensors in bfloat16, tokenizer and chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from mini.model import Shape

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# Maps this package's tensor names to Qwen3's; the name of a layer follows "layers.<n>.".
NAMES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "embed": "embed_tokens",
    "norm": "norm",
}


def qwen3_name(name: str) -> str:
    *layer, module, _ = name.split(".")
    return ".".join(["model", *layer, NAMES[module], "weight"])


def config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "torch_dtype": "bfloat16",
    }


def export(shape: Shape, weights: dict[str, Tensor], tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        qwen3_name(name): weight.to("cpu", torch.bfloat16).contiguous()
        for name, weight in weights.items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    shutil.copy(TEMPLATE, out / "chat_template.jinja")
    end, pad = (tokenizer.token_to_id(mark) for mark in ("<|im_end|>", "<|endoftext|>"))
    _write(out / "config.json", config(shape, tokenizer))
    _write(
        out / "generation_config.json",
        {"do_sample": False, "temperature": 0, "eos_token_id": [end, pad], "pad_token_id": pad},
    )
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": shape.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
