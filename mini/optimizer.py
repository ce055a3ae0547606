"""The optimizers of headrace-mini: orthogonal steps for matrices, Adam for everything else."""

import torch
from torch import Tensor, nn

# The coefficients of the quintic iteration that Muon uses.
NEWTON = (3.4445, -4.7750, 2.0315)


def orthogonal(g: Tensor, num_iterations: int = 5) -> Tensor:
    """Return the nearest matrices with singular values of about one, [n, rows, columns]."""
    a, b, c = NEWTON
    tall = g.size(-2) > g.size(-1)
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Makes the momentum orthogonal; matrices of the same shape are computed as one stack."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        shapes = dict.fromkeys(p.shape for p in matrices)
        groups = [{"params": [p for p in matrices if p.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            momentum = group["momentum"]
            moved = []
            for p in params:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - momentum)
                moved.append(p.grad.lerp(state["momentum"], momentum))
            scale = max(1.0, params[0].size(0) / params[0].size(1)) ** 0.5
            for p, update in zip(params, orthogonal(torch.stack(moved)), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    norms = [p for p in model.parameters() if p.dim() == 1]
    embeddings = [p for name, p in named if "embed" in name]
    groups = [{"params": norms, "lr": 0.003}, {"params": embeddings, "lr": 0.001}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr=0.02), adam]
