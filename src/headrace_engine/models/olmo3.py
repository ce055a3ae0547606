"""OLMo 3: OLMo 2 with windows on three of four layers; rope scaling only on the other layers."""

from typing import Any

import msgspec
from torch import Tensor

from headrace_engine.models.layers import Rotary
from headrace_engine.models.olmo2 import Olmo2
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import (
    TextConfig,
    layer_windows,
    positive,
    read_rope,
    read_text_config,
)


class Olmo3(Olmo2):
    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        local = config.local_rope or config.rope
        self.local_rotary = Rotary(msgspec.structs.replace(config, rope=local))

    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        rope, local = _ropes(config)
        text = _DEFAULTS | config | {"rope_scaling": None, "rope_parameters": rope}
        text["layer_types"] = config.get("layer_types") or [
            "sliding_attention" if (layer + 1) % 4 else "full_attention"
            for layer in range(positive(config, "num_hidden_layers"))
        ]
        has_bias = config.get("attention_bias", False)
        read = read_text_config(
            text,
            layer_windows(text, text["sliding_window"]),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
        )
        local_rope, _ = read_rope(text | {"rope_parameters": local})
        return msgspec.structs.replace(read, local_rope=local_rope)

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        x = self.embed(token_ids)
        rotate, rotate_local = self.rotary(step.positions), self.local_rotary(step.positions)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            x = layer(x, rotate if cache.window is None else rotate_local, step)
        return self.norm(x)


_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}


def _ropes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rope parameters for layers without a window, then for layers with a window."""
    given = config.get("rope_parameters") or {}
    if "full_attention" in given:
        return given["full_attention"] or {}, given.get("sliding_attention") or {}
    # Older configs have one base for all layers, and scale only the layers without a window.
    theta = given.get("rope_theta") or config.get("rope_theta")
    base = {"rope_theta": theta} if theta else {}
    return base | (config.get("rope_scaling") or given), base
