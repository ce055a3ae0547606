"""Experts of a layer: many gated MLPs, of which each token takes the few that a router scores best.

Some families have one more beside them that every token takes, behind a gate of its own.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from headrace_common.errors import ModelError
from headrace_engine.models.layers import GatedMLP
from headrace_engine.models.step import BARE, Linears
from headrace_engine.models.text_config import TextConfig, positive

WEIGHTS = {
    "layers.*.mlp.router": ("model.layers.*.mlp.gate",),
    "layers.*.mlp.experts.*.gate_up": (
        "model.layers.*.mlp.experts.*.gate_proj",
        "model.layers.*.mlp.experts.*.up_proj",
    ),
    "layers.*.mlp.experts.*.down": ("model.layers.*.mlp.experts.*.down_proj",),
}
SHARED = {
    "layers.*.mlp.shared.gate_up": (
        "model.layers.*.mlp.shared_expert.gate_proj",
        "model.layers.*.mlp.shared_expert.up_proj",
    ),
    "layers.*.mlp.shared.down": ("model.layers.*.mlp.shared_expert.down_proj",),
    "layers.*.mlp.shared_gate": ("model.layers.*.mlp.shared_expert_gate",),
}
"""Of the expert that all tokens take."""


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    num: int
    num_chosen: int  # by each token
    size: int  # the mlp_size of each
    sums_to_one: bool  # the weights of those chosen
    shared_size: int = 0  # of the one that all tokens take; 0: there is none
    has_router_bias: bool = False


class RoutedMLP(nn.Module):
    """The weighted sum of a few experts, each computed once for all of a step's tokens.

    `router` and `shared_gate` are never rounded to 8 or 4 bits: it would send tokens elsewhere.
    """

    expert: type[GatedMLP] = GatedMLP

    def __init__(self, text: TextConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        e, hidden = experts, text.hidden_size

        def mlp(size: int) -> GatedMLP:
            return self.expert(msgspec.structs.replace(text, mlp_size=size))

        self.num_chosen, self.sums_to_one = e.num_chosen, e.sums_to_one
        self.router = nn.Linear(hidden, e.num, bias=e.has_router_bias)
        self.experts = nn.ModuleList(mlp(e.size) for _ in range(e.num))
        self.shared = mlp(e.shared_size) if e.shared_size else None
        self.shared_gate = nn.Linear(hidden, 1, bias=False) if e.shared_size else None

    def forward(self, x: Tensor, step: Linears) -> Tensor:
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
                out.index_add_(0, tokens, expert(x[tokens], BARE) * weights[mine, None])
        if self.shared is None or self.shared_gate is None:
            return out
        return out + self.shared_gate(x).sigmoid() * self.shared(x, BARE)


def read_experts(
    config: dict[str, Any],
    sums_to_one: bool,
    shared_size: int = 0,
    has_router_bias: bool = False,
) -> ExpertsConfig:
    """Reads what the families' configs have in common; ModelError if it cannot be."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    num, num_chosen = positive(config, key), positive(config, "num_experts_per_tok")
    if num_chosen > num:
        message = f"Of {num} experts a token cannot take {num_chosen}; check config."
        raise ModelError(message, "model_corrupt")
    return ExpertsConfig(
        num=num,
        num_chosen=num_chosen,
        size=positive(config, "moe_intermediate_size"),
        sums_to_one=sums_to_one,
        shared_size=shared_size,
        has_router_bias=has_router_bias,
    )


def routed_layers(config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it has experts; the others have one gated MLP."""
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
