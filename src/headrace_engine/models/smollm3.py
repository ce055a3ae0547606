"""SmolLM3: Llama without rotary positions on every fourth layer (NoPE)."""

from typing import Any

import msgspec
from torch import Tensor

from headrace_common.errors import ModelError
from headrace_engine.models.llama import Llama
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import (
    TextConfig,
    layer_windows,
    positive,
    read_text_config,
)


class SmolLM3(Llama):
    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        self.rotated = config.rotated or (True,) * config.num_layers

    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        config = _DEFAULTS | config
        rotated = _rotated(config)
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        kinds = ["full_attention" if it else "sliding_attention" for it in rotated]
        text = config | {"layer_types": config.get("layer_types") or kinds}
        has_bias = config.get("attention_bias", False)
        read = read_text_config(
            text,
            layer_windows(text, window),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=config.get("mlp_bias", False),
        )
        return msgspec.structs.replace(read, rotated=rotated)

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        x = self.embed(token_ids)
        rotate = self.rotary(step.positions)
        for layer, is_rotated in zip(self.layers, self.rotated, strict=True):
            x = layer(x, rotate if is_rotated else _unchanged, step)
        return self.norm(x)


_DEFAULTS = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}


def _rotated(config: dict[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it rotates; in `no_rope_layers`, 1 stands for rotating."""
    layers = positive(config, "num_hidden_layers")
    given = config.get("no_rope_layers")
    if given is None:
        every = config.get("no_rope_layer_interval") or 4
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) < layers:
        raise ModelError(
            "config.json has no valid no_rope_layers; download it again.", "model_corrupt"
        )
    return tuple(map(bool, given[:layers]))


def _unchanged(x: Tensor) -> Tensor:
    return x
