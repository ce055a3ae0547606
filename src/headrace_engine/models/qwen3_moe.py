"""Qwen3-MoE: Qwen3 whose MLPs are many experts; each token takes a few of them."""

from typing import Any

import msgspec

from headrace_engine.models.experts import WEIGHTS as _EXPERTS
from headrace_engine.models.experts import ExpertsConfig, RoutedMLP, read_experts, routed_layers
from headrace_engine.models.qwen3 import WEIGHTS, Qwen3
from headrace_engine.models.text_config import TextConfig


class MoeConfig(msgspec.Struct, frozen=True):
    text: TextConfig  # its mlp_size is that of the layers without experts
    experts: ExpertsConfig
    routed: tuple[bool, ...]  # per layer, whether it has experts

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
        windows = (window,) * text.num_layers  # unlike in Qwen3, all layers or none
        return MoeConfig(
            msgspec.structs.replace(text, windows=windows),
            read_experts(config, sums_to_one=config.get("norm_topk_prob", False)),
            routed_layers(config, text.num_layers),
        )
