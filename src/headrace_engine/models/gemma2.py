"""Gemma 2: Llama with a norm after each sublayer, soft caps, and a window on every other layer."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from headrace_common.errors import ModelError
from headrace_engine.models.layers import GeluMLP, Rotary, Rotation, ScaledEmbedding, ShiftedNorm
from headrace_engine.models.llama import WEIGHTS as _LLAMA
from headrace_engine.models.llama import LlamaAttention
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import (
    Rope,
    TextConfig,
    layer_windows,
    positive,
    read_text_config,
)

WEIGHTS = _LLAMA | {
    "layers.*.mlp_norm": ("model.layers.*.pre_feedforward_layernorm",),
    "layers.*.post_mlp_norm": ("model.layers.*.post_feedforward_layernorm",),
}


class GemmaConfig(msgspec.Struct, frozen=True):
    text: TextConfig
    # Attention scores are divided by the square root of `query_size`, not of `head_dim`.
    query_size: float
    score_cap: float | None
    logit_cap: float | None
    # Rotary settings of the layers with a window; None if all layers use the same settings.
    local_rope: Rope | None = None

    @property
    def num_layers(self) -> int:
        return self.text.num_layers


class Gemma2Attention(LlamaAttention):
    def __init__(self, config: GemmaConfig, layer: int) -> None:
        super().__init__(config.text, layer)
        # `attend` divides scores by the square root of `dim`. The factor changes this divisor to
        # the square root of `query_size`.
        self.factor = (self.dim / config.query_size) ** 0.5
        self.cap = config.score_cap

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        qkv = step.linear(self.qkv, x).view(
            len(x), -1, self.dim
        )  # [tokens, heads + 2 kv_heads, dim]
        q, k, v = qkv.split(self.heads, dim=1)
        q = self.scaled(rotate(q))  # [tokens, heads, dim]
        k = rotate(k)  # [tokens, kv_heads, dim]
        out = step.attend(self.layer, q, k, v, self.cap).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]

    def scaled(self, q: Tensor) -> Tensor:
        return q if self.factor == 1 else q * self.factor


class Gemma2Layer(nn.Module):
    def __init__(self, config: TextConfig, attention: nn.Module) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_norm, self.post_norm = ShiftedNorm(size, eps), ShiftedNorm(size, eps)
        self.attention = attention
        self.mlp_norm, self.post_mlp_norm = ShiftedNorm(size, eps), ShiftedNorm(size, eps)
        self.mlp = GeluMLP(config)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        x = x + self.post_norm(self.attention(self.input_norm(x), rotate, step))
        return x + self.post_mlp_norm(self.mlp(self.mlp_norm(x), step))


class Gemma2(nn.Module):
    weights = WEIGHTS
    attention: type[nn.Module] = Gemma2Attention

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        c = config.text
        self.cache = c.cache
        self.embed = ScaledEmbedding(c.vocab_size, c.hidden_size)
        attentions = (self.attention(config, layer) for layer in range(c.num_layers))
        self.layers = nn.ModuleList(Gemma2Layer(c, attention) for attention in attentions)
        self.norm = ShiftedNorm(c.hidden_size, c.norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.is_tied:
            self.head.weight = self.embed.weight
        self.rotary = Rotary(c)
        self.cap = config.logit_cap

    @staticmethod
    def read(config: dict[str, Any]) -> GemmaConfig:
        return read_gemma_config(_DEFAULTS | config, full_every=2)

    @property
    def sinks(self) -> Sequence[Tensor]:
        """Return the attention sinks of each layer, float32 [heads]; empty if there are none."""
        return ()

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        x = self.embed(token_ids)
        rotate = self.rotary(step.positions)
        for layer in self.layers:
            x = layer(x, rotate, step)
        return self.norm(x)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of the hidden states in `rows`, float32 [rows, vocabulary]."""
        logits = self.head(rows).float()
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GELU = "gelu_pytorch_tanh"


def read_gemma_config(config: dict[str, Any], full_every: int) -> GemmaConfig:
    """Read a config; by default every `full_every`-th layer attends without a window."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or _GELU
    if activation != _GELU:
        raise ModelError(
            f"Activation {activation} is not supported natively; the only supported activation is "
            f"{_GELU}."
        )
    if config.get("use_bidirectional_attention"):
        raise ModelError("Bidirectional attention is not supported natively.")
    text = {key: value for key, value in config.items() if key != "hidden_act"}
    text["layer_types"] = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % full_every else "full_attention"
        for layer in range(positive(config, "num_hidden_layers"))
    ]
    has_bias = config.get("attention_bias", False)
    return GemmaConfig(
        read_text_config(
            text,
            windows=layer_windows(text, config.get("sliding_window")),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
        ),
        query_size=_number(config, "query_pre_attn_scalar") or 256,
        score_cap=_number(config, "attn_logit_softcapping"),
        logit_cap=_number(config, "final_logit_softcapping"),
    )


def _number(config: dict[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is not None and not (isinstance(value, int | float) and value > 0):
        raise ModelError(f"config.json has no valid {key}; download it again.", "model_corrupt")
    return value
