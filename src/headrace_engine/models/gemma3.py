"""Gemma 3: Gemma 2 with normed queries and keys, and a second rope for windowed layers."""

from typing import Any

import msgspec
from torch import Tensor

from headrace_engine.models.gemma2 import WEIGHTS as _GEMMA2
from headrace_engine.models.gemma2 import Gemma2, Gemma2Attention, GemmaConfig, read_gemma_config
from headrace_engine.models.layers import Rotary, Rotation, ShiftedNorm
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import read_rope

WEIGHTS = _GEMMA2 | {
    "layers.*.attention.q_norm": ("model.layers.*.self_attn.q_norm",),
    "layers.*.attention.k_norm": ("model.layers.*.self_attn.k_norm",),
}


class Gemma3Attention(Gemma2Attention):
    def __init__(self, config: GemmaConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = ShiftedNorm(self.dim, config.text.norm_eps)
        self.k_norm = ShiftedNorm(self.dim, config.text.norm_eps)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        qkv = step.linear(self.qkv, x).view(
            len(x), -1, self.dim
        )  # [tokens, heads + 2 kv_heads, dim]
        q, k, v = qkv.split(self.heads, dim=1)
        q = self.scaled(rotate(self.q_norm(q)))  # [tokens, heads, dim]
        k = rotate(self.k_norm(k))  # [tokens, kv_heads, dim]
        out = step.attend(self.layer, q, k, v).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]


class Gemma3(Gemma2):
    weights = WEIGHTS
    attention = Gemma3Attention

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(config)
        self.local_rotary = Rotary(msgspec.structs.replace(config.text, rope=config.local_rope))

    @staticmethod
    def read(config: dict[str, Any]) -> GemmaConfig:
        rope, local = _ropes(config)
        text = _DEFAULTS | config | {"rope_scaling": None, "rope_parameters": rope}
        local_rope, _ = read_rope(text | {"rope_parameters": local})
        every = config.get("sliding_window_pattern") or 6
        return msgspec.structs.replace(read_gemma_config(text, every), local_rope=local_rope)

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        x = self.embed(token_ids)
        rotate, rotate_local = self.rotary(step.positions), self.local_rotary(step.positions)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            x = layer(x, rotate if cache.window is None else rotate_local, step)
        return self.norm(x)


_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}


def _ropes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rope parameters for layers without a window, then for layers with a window."""
    given = config.get("rope_parameters") or {}
    if "full_attention" in given:
        rope, local = given["full_attention"] or {}, given.get("sliding_attention") or {}
    else:
        rope, local = config.get("rope_scaling") or given, {}
    theta, local_theta = config.get("rope_theta"), config.get("rope_local_base_freq")
    return (
        {"rope_theta": theta or 1_000_000.0} | rope,
        {"rope_theta": local_theta or 10_000.0} | local,
    )
