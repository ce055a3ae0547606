"""The text model of Qwen3.5-MoE: Qwen3.5 whose MLPs are routed experts plus a shared expert."""

from typing import Any

import msgspec

from headrace_engine.models.experts import SHARED, ExpertsConfig, RoutedMLP, read_experts
from headrace_engine.models.experts import WEIGHTS as _EXPERTS
from headrace_engine.models.qwen3_5 import WEIGHTS as _QWEN3_5
from headrace_engine.models.qwen3_5 import Qwen35, Qwen35Config
from headrace_engine.models.text_config import positive

WEIGHTS = _QWEN3_5 | _EXPERTS | SHARED


class Qwen35MoeConfig(msgspec.Struct, frozen=True):
    hybrid: Qwen35Config
    experts: ExpertsConfig
    # Whether each layer has experts.
    routed: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        return self.hybrid.num_layers


class Qwen35Moe(Qwen35):
    weights = WEIGHTS

    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__(config.hybrid)
        for layer, is_routed in zip(self.layers, config.routed, strict=True):
            if is_routed:
                layer.mlp = RoutedMLP(config.hybrid.text, config.experts)

    @staticmethod
    def read(config: dict[str, Any]) -> Qwen35MoeConfig:  # type: ignore[override]
        text = config.get("text_config") or config
        shared = positive(text, "shared_expert_intermediate_size")
        # Every layer has experts, so configs omit the size of a plain MLP, which Qwen35.read
        # requires.
        hybrid = Qwen35.read(config | {"text_config": text | {"intermediate_size": shared}})
        experts = read_experts(text, sums_to_one=True, shared_size=shared)
        return Qwen35MoeConfig(hybrid, experts, (True,) * hybrid.num_layers)

    @staticmethod
    def with_one_layer(config: Qwen35MoeConfig) -> Qwen35MoeConfig:  # type: ignore[override]
        hybrid = Qwen35.with_one_layer(config.hybrid)
        return msgspec.structs.replace(config, hybrid=hybrid, routed=(True,))
