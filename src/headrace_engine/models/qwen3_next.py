"""Qwen3-Next: computes like Qwen3.5-MoE from differently stored weights.

Its files interleave the projections of a delta net by head; checkpoints/stacked_tensors.py
separates them.
"""

from typing import Any

from headrace_engine.models.experts import read_experts, routed_layers
from headrace_engine.models.qwen3_5 import Qwen35
from headrace_engine.models.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig
from headrace_engine.models.text_config import positive


class Qwen3Next(Qwen35Moe):
    @staticmethod
    def read(config: dict[str, Any]) -> Qwen35MoeConfig:  # type: ignore[override]
        hybrid = Qwen35.read(config)
        shared = positive(config, "shared_expert_intermediate_size")
        sums_to_one = config.get("norm_topk_prob", True)
        experts = read_experts(config, sums_to_one=sums_to_one, shared_size=shared)
        return Qwen35MoeConfig(hybrid, experts, routed_layers(config, hybrid.num_layers))
