"""Tiny models with seeded random weights, made by transformers and written as real folders."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
END = 258  # <|im_end|>
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
}


def make_tiny_model(
    folder: Path, architecture: str = "Qwen3ForCausalLM", seed: int = 0, **config: Any
) -> Path:
    """A model folder (weights, config, byte-level tokenizer, chat template); returns it.

    `config` overrides keys of the model's config; a key that is None is left to its default.
    `dtype` and `max_shard_size` are for the weight files.
    """
    dtype = config.pop("dtype", torch.float32)
    max_shard_size = config.pop("max_shard_size", "1GB")
    model_class = getattr(transformers, architecture)
    keys = {key: value for key, value in (_SHAPE | config).items() if value is not None}
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**keys)).to(dtype)
    _unsettle(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _write_tokenizer(folder)
    return folder


def _unsettle(model: torch.nn.Module) -> None:
    """Gives norms and biases, which start as ones and zeros, values that a mix-up would show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def _write_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIALS[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
