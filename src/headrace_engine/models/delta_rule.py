"""Computes the gated delta rule for many tokens at a time, as pure functions of tensors.

Each head has a state S [key_dim, value_dim] (Yang et al., 2024, "Gated Delta Networks"). A token
first scales the state by a forget factor. The token then corrects the state: afterwards, a lookup
by the token's key returns a result closer to the token's value.

    S_t = exp(decay_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - exp(decay_t) S_{t-1}^T k_t)
    out_t = S_t^T q_t

q and k are normalized to length 1, and q is then scaled by key_dim ** -0.5.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Added to a vector's squared length before the square root, to avoid a division by zero.
EPS = 1e-6
# The number of tokens in a span. The corrections of a span are the solution of one linear system.
_SPAN = 64


def delta_rule(
    qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Return out [tokens, value_heads, value_dim] and update `state` in place.

    `state` has the shape [value_heads, key_dim, value_dim]; Step.delta_rule documents the other
    shapes. Each key head serves value_heads / key_heads consecutive value heads.
    """
    q, k, v = qkv
    group = v.shape[1] // k.shape[1]
    q, k = (_unit(x).repeat_interleave(group, dim=1).transpose(0, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5  # [value_heads, tokens, key_dim]
    v, decay, beta = v.transpose(0, 1), decay.T, beta.T
    out = torch.empty_like(v)
    for first in range(0, v.shape[1], _SPAN):
        span = slice(first, first + _SPAN)
        part = q[:, span], k[:, span], v[:, span]
        out[:, span] = _take_span(part, decay[:, span], beta[:, span], state)
    return out.transpose(0, 1)


def _take_span(
    qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Compute the outputs of one span of tokens and update `state` in place.

    Each correction u_i depends on the state that the earlier corrections left. Over the whole span,
    these dependencies are a triangular system of linear equations:

    u_i + beta_i sum_{j<i} exp(c_i - c_j) (k_i k_j) u_j = beta_i (v_i - exp(c_i) S^T k_i)

    Here c is the running sum of decay since the start of the span, and S is the state at the start
    of the span. One triangular solve returns all u, so the span needs matrix products instead of a
    loop.
    """
    q, k, v = qkv  # [heads, span, dim]
    total = decay.cumsum(dim=1)  # c: [heads, span]
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()  # [heads, span, span]
    from_start = total.exp()[..., None]  # [heads, span, 1]
    beta = beta[..., None]
    system = beta * between * (k @ k.mT)
    targets = beta * (v - from_start * (k @ state))
    u = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    out = from_start * (q @ state) + (between * (q @ k.mT)) @ u
    # How much each token's correction has decayed at the end of the span, as a factor.
    to_end = (total[:, -1:] - total).exp()[..., None]
    state.mul_(from_start[:, -1:]).add_((to_end * k).mT @ u)
    return out


def delta_rule_of_many(
    qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, states: Tensor
) -> Tensor:
    """Return the outputs of one token of each of many sequences; update `states` in place.

    Row i of every argument belongs to sequence i. `states` has the shape [sequences, value_heads,
    key_dim, value_dim].
    """
    q, k, v = qkv
    group = v.shape[1] // k.shape[1]
    q, k = (_unit(x).repeat_interleave(group, dim=1)[:, :, None] for x in (q, k))
    q = q * q.shape[-1] ** -0.5  # [sequences, value_heads, 1, key_dim]
    states.mul_(decay.exp()[..., None, None])
    u = beta[..., None, None] * (v[:, :, None] - k @ states)
    states.add_(k.mT * u)
    return (q @ states)[:, :, 0]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def convolve(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Return silu of the sums that Step.convolve defines.

    `before`: [width - 1, channels], the inputs that precede x.
    """
    inputs = torch.cat((before, x)).float().T  # [channels, width - 1 + tokens]
    summed = F.conv1d(inputs, weight.float().T[:, None], groups=len(inputs))
    return F.silu(summed.T)


def convolve_of_many(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Return the sums that Step.convolve defines, for one token of each of many sequences.

    x: [sequences, channels]; `before`: [sequences, width - 1, channels].
    """
    inputs = torch.cat((before, x[:, None]), dim=1)
    return F.silu((inputs.float() * weight.float()).sum(1))
