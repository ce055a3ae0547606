"""Mixture-of-experts layers: a router selects a few of many gated MLPs for each token.

Some families add a shared expert, which processes every token and has a separate gate.
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
"""Weights of the shared expert."""


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    num: int
    # How many experts the router selects for each token.
    num_chosen: int
    # The intermediate size of each expert.
    size: int
    # Whether the weights of the selected experts are normalized to sum to 1.
    sums_to_one: bool
    # The intermediate size of the shared expert; 0 if the model has none.
    shared_size: int = 0
    has_router_bias: bool = False


class RoutedMLP(nn.Module):
    """Computes the weighted sum of a few experts per token; each expert runs once per step.

    `router` and `shared_gate` are never quantized to 8 or 4 bits, because a rounding error could
    send tokens to different experts.
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

    def forward(
        self, x: Tensor, step: Linears, scores: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [tokens, hidden].

        `scores` [tokens, experts] replace the router's scores of x. `scale` [experts] multiplies
        the weights.
        """
        scores = self.router(x) if scores is None else scores
        # [tokens, experts], then [tokens, chosen]
        weights, chosen = scores.float().softmax(-1).topk(self.num_chosen)
        if self.sums_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        if scale is not None:
            weights = weights * scale[chosen]
        # The order by expert, then by token.
        order = chosen.flatten().argsort(stable=True)  # [tokens * chosen]
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        weights = weights.to(x.dtype).flatten()
        out = torch.zeros_like(x)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                assigned = order[first : first + count]
                tokens, first = assigned // self.num_chosen, first + count
                out.index_add_(0, tokens, expert(x[tokens], BARE) * weights[assigned, None])
        if self.shared is None or self.shared_gate is None:
            return out
        return out + self.shared_gate(x).sigmoid() * self.shared(x, BARE)


def read_experts(
    config: dict[str, Any],
    sums_to_one: bool,
    shared_size: int = 0,
    has_router_bias: bool = False,
) -> ExpertsConfig:
    """Read the expert settings that the families' configs share; ModelError if one is invalid."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    num, num_chosen = positive(config, key), positive(config, "num_experts_per_tok")
    if num_chosen > num:
        message = f"config.json selects {num_chosen} of {num} experts per token; check the file."
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
    """Return for each layer whether the layer has experts instead of one gated MLP."""
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
