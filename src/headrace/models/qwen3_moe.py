"""Qwen3-MoE: Qwen3 whose MLPs are many experts; each token takes a few of them."""

from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from headrace.core.errors import ModelError
from headrace.models.layers import GatedMLP
from headrace.models.qwen3 import WEIGHTS, Qwen3
from headrace.models.text_config import TextConfig, positive


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    text: TextConfig  # its mlp_size is that of the layers without experts
    num_experts: int
    num_chosen: int  # by each token
    expert_size: int
    sums_to_one: bool  # the weights of those chosen
    routed: tuple[bool, ...]  # per layer, whether it has experts

    @property
    def num_layers(self) -> int:
        return self.text.num_layers


class Router(nn.Linear):
    """Scores of the experts. Never quantized: rounding would send tokens elsewhere."""


class RoutedMLP(nn.Module):
    """The weighted sum of a few experts, each computed once for all of a step's tokens."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        c = config
        expert = msgspec.structs.replace(c.text, mlp_size=c.expert_size)
        self.num_chosen, self.sums_to_one = c.num_chosen, c.sums_to_one
        self.router = Router(c.text.hidden_size, c.num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(expert) for _ in range(c.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).float().softmax(-1)  # [tokens, experts]
        weights, chosen = scores.topk(self.num_chosen)  # [tokens, chosen]
        if self.sums_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        places = chosen.flatten().argsort(stable=True)  # expert by expert, tokens in order
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        weights = weights.to(x.dtype).flatten()
        out = torch.zeros_like(x)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = places[first : first + count]
                tokens, first = mine // self.num_chosen, first + count
                out.index_add_(0, tokens, expert(x[tokens]) * weights[mine, None])
        return out


class Qwen3Moe(Qwen3):
    weights = WEIGHTS | {
        "layers.*.mlp.router": ("model.layers.*.mlp.gate",),
        "layers.*.mlp.experts.*.gate_up": (
            "model.layers.*.mlp.experts.*.gate_proj",
            "model.layers.*.mlp.experts.*.up_proj",
        ),
        "layers.*.mlp.experts.*.down": ("model.layers.*.mlp.experts.*.down_proj",),
    }

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config.text)
        for layer, is_routed in zip(self.layers, config.routed, strict=True):
            if is_routed:
                layer.mlp = RoutedMLP(config)

    @staticmethod
    def read(config: dict[str, Any]) -> MoeConfig:  # type: ignore[override]
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        text = Qwen3.read(config | {"use_sliding_window": False})
        windows = (window,) * text.num_layers  # unlike in Qwen3, all layers or none
        every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        num_experts, num_chosen = positive(config, key), positive(config, "num_experts_per_tok")
        if num_chosen > num_experts:
            message = f"Of {num_experts} experts a token cannot take {num_chosen}; check config."
            raise ModelError(message, "model_corrupt")
        return MoeConfig(
            text=msgspec.structs.replace(text, windows=windows),
            num_experts=num_experts,
            num_chosen=num_chosen,
            expert_size=positive(config, "moe_intermediate_size"),
            sums_to_one=config.get("norm_topk_prob", False),
            routed=tuple(
                layer not in dense and (layer + 1) % every == 0 for layer in range(text.num_layers)
            ),
        )
