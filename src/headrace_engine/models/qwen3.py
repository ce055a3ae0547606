"""Qwen3, dense: Llama with queries and keys normed per head, and windows on some layers."""

from typing import Any

from torch import Tensor

from headrace_engine.models.layers import RMSNorm, Rotation
from headrace_engine.models.llama import WEIGHTS as _LLAMA
from headrace_engine.models.llama import Llama, LlamaAttention
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import TextConfig, layer_windows, read_text_config

WEIGHTS = _LLAMA | {
    "layers.*.attention.q_norm": ("model.layers.*.self_attn.q_norm",),
    "layers.*.attention.k_norm": ("model.layers.*.self_attn.k_norm",),
}


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        qkv = step.linear(self.qkv, x).view(
            len(x), -1, self.dim
        )  # [tokens, heads + 2 kv_heads, dim]
        q, k, v = qkv.split(self.heads, dim=1)
        q = rotate(self.q_norm(q))  # [tokens, heads, dim]
        k = rotate(self.k_norm(k))  # [tokens, kv_heads, dim]
        out = step.attend(self.layer, q, k, v).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]


class Qwen3(Llama):
    weights = WEIGHTS
    attention = Qwen3Attention

    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        has_bias = config.get("attention_bias", False)
        return read_text_config(
            config, layer_windows(config, window), has_qkv_bias=has_bias, has_out_bias=has_bias
        )
