"""Qwen3-MoE: Qwen3 with experts in place of the MLP; each token uses a few of many experts."""

from typing import Any

import msgspec

from headrace_engine.models.experts import WEIGHTS as _EXPERTS
from headrace_engine.models.experts import ExpertsConfig, RoutedMLP, read_experts, routed_layers
from headrace_engine.models.qwen3 import WEIGHTS, Qwen3
from headrace_engine.models.text_config import TextConfig


class MoeConfig(msgspec.Struct, frozen=True):
    # `text.mlp_size` is the MLP size of the layers without experts.
    text: TextConfig
    experts: ExpertsConfig
    # Whether each layer has experts.
    routed: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        return self.text.num_layers


class Qwen3Moe(Qwen3):
    weights = WEIGHTS | _EXPERTS

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config.text)
        for layer, is_routed in zip(self.layers, config.routed, strict=True):
            if is_routed:
                layer.mlp = RoutedMLP(config.text, config.experts)

    @staticmethod
    def read(config: dict[str, Any]) -> MoeConfig:  # type: ignore[override]
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        text = Qwen3.read(config | {"use_sliding_window": False})
        # Unlike in Qwen3, the window applies to all layers or to no layer.
        windows = (window,) * text.num_layers
        return MoeConfig(
            msgspec.structs.replace(text, windows=windows),
            read_experts(config, sums_to_one=config.get("norm_topk_prob", False)),
            routed_layers(config, text.num_layers),
        )
