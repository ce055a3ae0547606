"""Initializes the first two layers so that they already copy, which training alone learns last.

An induction head asks "what followed this token earlier?". For that it needs another head that
writes into each token which token precedes it. Neither is useful without the other, so training
alone finds the pair only after many steps. Here both are set roughly, and training refines them.
"""

import torch
from torch import Tensor

from mini.model import Layer, Mini

# Rotary pairs of a head that rotate so slowly that distance does not disturb a comparison.
NUM_SLOW = 14
# Rotary pairs that rotate fast enough to distinguish adjacent tokens.
NUM_FAST = 6
WIDTH = 2 * NUM_SLOW
SHARPNESS = 2.0
# How strongly the heads write, compared with embeddings of 0.05.
NOTED, COPIED = 0.15, 0.3


def given(model: Mini) -> set[str]:
    """Return the names of the weights that copy; early, noisy steps would destroy them."""
    parts = ("q.", "k.", "v.", "q_norm.", "k_norm.")
    names = {f"layers.{n}.{part}weight" for n in (0, 1) for part in parts}
    return names | {"layers.0.o.weight"}


@torch.no_grad()
def begin(model: Mini) -> None:
    """Overwrites parts of the first two layers; needs layers with two groups of two heads."""
    size = model.shape.hidden - 1
    basis, _ = torch.linalg.qr(torch.randn(size, size))
    # Dimension 0 is the same for all tokens.
    basis = torch.cat((torch.zeros(size, 1), basis), dim=1)
    model.embed.weight[:, 0] = 0.15
    here, before, twice_before, rest = basis.split([WIDTH, WIDTH, WIDTH, size - 3 * WIDTH])
    _look_back(model.layers[0], here, before, twice_before)
    _copy(model.layers[1], here, before, twice_before, rest)


def _look_back(layer: Layer, here: Tensor, before: Tensor, twice_before: Tensor) -> None:
    """Make heads 0 and 1 write which tokens are one and two positions back.

    Their query is constant, and rotated by the distance that they look back.
    """
    dim, theta = layer.shape.head_dim, layer.shape.rope_theta
    angles = theta ** (-torch.arange(0, 2 * NUM_FAST, 2) / dim)
    layer.k.weight[:NUM_FAST, 0] = 1.0
    for head, target in enumerate((before, twice_before)):
        turned = (head + 1) * angles
        start = head * dim
        layer.q.weight[start : start + NUM_FAST, 0] = turned.cos()
        layer.q.weight[start + dim // 2 : start + dim // 2 + NUM_FAST, 0] = -turned.sin()
        layer.o.weight[:, start : start + WIDTH] = NOTED * target.T
    layer.v.weight[:WIDTH] = here
    layer.q_norm.weight.fill_(SHARPNESS)
    layer.k_norm.weight.fill_(SHARPNESS)


def _copy(layer: Layer, here: Tensor, before: Tensor, twice_before: Tensor, rest: Tensor) -> None:
    """Make head 0 find the token after an equal token, and head 2 the one after an equal pair."""
    dim = layer.shape.head_dim
    slow = torch.cat([torch.arange(half - NUM_SLOW, half) for half in (dim // 2, dim)])
    layer.q.weight[slow] = here
    layer.k.weight[slow] = before
    # Half of the dimensions compare this token with the key's predecessor, the other half compare
    # the
    # two predecessors.
    mixed = torch.arange(WIDTH) % 2 == 0
    layer.q.weight[2 * dim + slow] = torch.where(mixed[:, None], here, before)
    layer.k.weight[dim + slow] = torch.where(mixed[:, None], before, twice_before)
    layer.v.weight[:dim] = torch.cat((here, rest))[:dim]
    layer.v.weight[dim:] = torch.cat((rest, here))[:dim]
    layer.o.weight[:, :dim] = COPIED * layer.v.weight[:dim].T
    layer.o.weight[:, 2 * dim : 3 * dim] = COPIED * layer.v.weight[dim:].T
    layer.q_norm.weight.fill_(SHARPNESS)
    layer.k_norm.weight.fill_(SHARPNESS)
