"""Granite: Llama with multipliers for embeddings, attention scores, residuals and logits."""

from typing import Any

import msgspec
from torch import Tensor, nn

from headrace_common.errors import ModelError
from headrace_engine.models.layers import Rotation
from headrace_engine.models.llama import Llama, LlamaAttention, LlamaLayer
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import TextConfig


class GraniteConfig(msgspec.Struct, frozen=True):
    text: TextConfig
    embedding_multiplier: float
    # Attention scores are multiplied by this number in place of head_dim ** -0.5.
    attention_multiplier: float
    residual_multiplier: float
    # Logits are divided by this number.
    logits_scaling: float

    @property
    def num_layers(self) -> int:
        return self.text.num_layers


class GraniteAttention(LlamaAttention):
    def __init__(self, config: GraniteConfig, layer: int) -> None:
        super().__init__(config.text, layer)
        # `attend` multiplies scores by dim ** -0.5. The factor replaces that by the multiplier.
        self.factor = config.attention_multiplier * self.dim**0.5

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        qkv = step.linear(self.qkv, x).view(
            len(x), -1, self.dim
        )  # [tokens, heads + 2 kv_heads, dim]
        q, k, v = qkv.split(self.heads, dim=1)
        q = rotate(q) * self.factor  # [tokens, heads, dim]
        k = rotate(k)  # [tokens, kv_heads, dim]
        out = step.attend(self.layer, q, k, v).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]


class GraniteLayer(LlamaLayer):
    def __init__(self, config: GraniteConfig, layer: int) -> None:
        super().__init__(config.text, GraniteAttention(config, layer))
        self.residual = config.residual_multiplier

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotate, step) * self.residual
        return x + self.mlp(self.post_norm(x), step) * self.residual


class Granite(Llama):
    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config.text)
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(GraniteLayer(config, layer) for layer in layers)
        self.config = config

    @staticmethod
    def read(config: dict[str, Any]) -> GraniteConfig:  # type: ignore[override]
        return GraniteConfig(Llama.read(config), *(_number(config, key) for key in _MULTIPLIERS))

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        x = self.embed(token_ids) * self.config.embedding_multiplier
        rotate = self.rotary(step.positions)
        for layer in self.layers:
            x = layer(x, rotate, step)
        return self.norm(x)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of the hidden states in `rows`, float32 [rows, vocabulary]."""
        return self.head(rows).float() / self.config.logits_scaling


_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


def _number(config: dict[str, Any], key: str) -> float:
    value = config.get(key, 1.0)
    if not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json has no valid {key}; download it again.", "model_corrupt")
    return float(value)
