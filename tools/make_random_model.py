"""Writes a model folder of a known shape with seeded random weights, for measurements.

    python tools/make_random_model.py --shape qwen3-0.6b --out DIR

The model generates noise, but as fast as a trained model of the same shape.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# One letter per byte. The letters that are ASCII characters come first.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
NUM_ASCII = sum(letter.isascii() for letter in LETTERS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "use_sliding_window": False,
}
_DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
}
SHAPES = {
    "qwen3-0.6b": _DENSE
    | {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    # This shape has about as many parameters as the dense shape above.
    "qwen3.5-0.5b": _HYBRID
    | {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    # A draft model for `qwen3-0.6b`. For each token, it reads about a thirteenth as many weights.
    "draft": _DENSE
    | {
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    # This shape is for trying a benchmark.
    "small": _DENSE
    | {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "tiny": _DENSE
    | {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "tiny-hybrid": _HYBRID
    | {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--positions", type=int, help="maximum sequence length, if not the shape's")
    parser.add_argument("--mtp", action="store_true", help="add an MTP layer to a hybrid shape")
    options = parser.parse_args()
    more = options.seed, options.positions, options.mtp
    count = make_random_model(options.out, options.shape, *more)
    print(f"{options.out}: {count / 1e6:.0f} million parameters")


def make_random_model(
    folder: Path, shape: str, seed: int = 0, positions: int | None = None, has_mtp: bool = False
) -> int:
    """Writes config, weights, tokenizer and chat template; returns the number of parameters.

    If `has_mtp` is true, a hybrid also gets the MTP layer that drafts for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_vocab = SHAPES[shape]["vocab_size"]
    end = num_vocab - 1
    config = _COMMON | SHAPES[shape] | {"eos_token_id": end, "bos_token_id": None}
    config["max_position_embeddings"] = positions or config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    _write_tokenizer(folder, num_vocab)
    weights = random_weights(config, seed, has_mtp)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())


def random_weights(config: dict, seed: int, has_mtp: bool = False) -> dict[str, torch.Tensor]:
    """Return normally distributed weights in bfloat16, by checkpoint name. Norms are 1.

    Bytes that can be part of a longer character are never the most probable tokens. Their text
    would have to wait for the rest of the character, and the stream would look stalled.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, is_hybrid = config["hidden_size"], "full_attention_interval" in config

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).bfloat16()

    def norm(size: int, less: int = int(is_hybrid)) -> torch.Tensor:
        return torch.full((size,), 1 - less, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": matrix(config["vocab_size"], hidden),
    }
    weights["lm_head.weight"][NUM_ASCII : len(LETTERS)] = 0
    every = config.get("full_attention_interval", 1)
    layers = [
        (f"model.layers.{layer}", not (layer + 1) % every)
        for layer in range(config["num_hidden_layers"])
    ]
    layers += [("mtp.layers.0", True)] if has_mtp else []
    for prefix, has_attention in layers:
        widths = (_attention_widths if has_attention else _delta_net_widths)(config)
        size = config["intermediate_size"]
        widths |= {"mlp.gate_proj": (size, hidden), "mlp.up_proj": (size, hidden)}
        for name, shape in (widths | {"mlp.down_proj": (hidden, size)}).items():
            weights[f"{prefix}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = norm(hidden)
        if has_attention:
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = norm(config["head_dim"])
            continue
        net, heads = f"{prefix}.linear_attn", config["linear_num_value_heads"]
        channels, width = widths["linear_attn.in_proj_qkv"][0], config["linear_conv_kernel_dim"]
        weights[f"{net}.conv1d.weight"] = matrix(channels, width)[:, None].clone()
        weights[f"{net}.A_log"] = torch.linspace(0.01, 16, heads).log().bfloat16()
        weights[f"{net}.dt_bias"] = torch.ones(heads, dtype=torch.bfloat16)
        weights[f"{net}.norm.weight"] = norm(config["linear_value_head_dim"], less=0)
    if has_mtp:
        weights["mtp.fc.weight"] = matrix(hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            weights[f"mtp.{name}.weight"] = norm(hidden)
    return weights


def _attention_widths(config: dict) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each matrix; a hybrid's query matrix also has the gates."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    gated = 2 if "full_attention_interval" in config else 1
    return {
        "self_attn.q_proj": (gated * heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
    }


def _delta_net_widths(config: dict) -> dict[str, tuple[int, int]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    return {
        "linear_attn.in_proj_qkv": (2 * keys + values, hidden),
        "linear_attn.in_proj_z": (values, hidden),
        "linear_attn.in_proj_b": (heads, hidden),
        "linear_attn.in_proj_a": (heads, hidden),
        "linear_attn.out_proj": (hidden, values),
    }


def _write_tokenizer(folder: Path, num_vocab: int) -> None:
    """Writes a tokenizer: all bytes, pieces of two or three ASCII letters, special tokens."""
    signs = LETTERS[:NUM_ASCII]
    pairs = [(a, b) for a in signs for b in signs]
    triples = [(a + b, c) for a, b in pairs for c in signs]
    merges = [*pairs, *triples][: num_vocab - len(LETTERS) - len(SPECIALS)]
    pieces = LETTERS + [a + b for a, b in merges]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIALS[-1],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2))


if __name__ == "__main__":
    main()
