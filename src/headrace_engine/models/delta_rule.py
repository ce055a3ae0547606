"""The gated delta rule, many tokens at a time; the formulas alone, with no memory behind them.

Of each head (Yang et al., 2024, "Gated Delta Networks"): a state S [key_dim, value_dim] forgets by
a factor, and is corrected so that the token's key comes nearer to finding the token's value:

    S_t = exp(decay_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - exp(decay_t) S_{t-1}^T k_t)
    out_t = S_t^T q_t

q and k are scaled to length 1, and q by key_dim ** -0.5.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # under the root of a length
_SPAN = 64  # tokens whose corrections are found together


def delta_rule(
    qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Out [tokens, value_heads, value_dim], and `state` [value_heads, key_dim, value_dim] moved on.

    Shapes are those of Step.delta_rule. A key head serves as many value heads in a row as there
    are for each.
    """
    q, k, v = qkv
    share = v.shape[1] // k.shape[1]
    q, k = (_unit(x).repeat_interleave(share, dim=1).transpose(0, 1) for x in (q, k))
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
    """All corrections u of a span at once, from the triangular system that they make:

    u_i + beta_i sum_{j<i} exp(c_i - c_j) (k_i k_j) u_j = beta_i (v_i - exp(c_i) S^T k_i)

    where c adds up decay from the begin of the span, and S is the state there.
    """
    q, k, v = qkv  # [heads, span, dim]
    total = decay.cumsum(dim=1)  # c: [heads, span]
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()  # [heads, span, span]
    kept = total.exp()[..., None]  # [heads, span, 1]
    beta = beta[..., None]
    system = beta * between * (k @ k.mT)
    wanted = beta * (v - kept * (k @ state))
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = kept * (q @ state) + (between * (q @ k.mT)) @ u
    left = (total[:, -1:] - total).exp()[..., None]  # of a token at the end of the span
    state.mul_(kept[:, -1:]).add_((left * k).mT @ u)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def convolve(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """silu of the sums of Step.convolve; before: [width - 1, channels], the inputs before x."""
    inputs = torch.cat((before, x)).float().T  # [channels, width - 1 + tokens]
    summed = F.conv1d(inputs, weight.float().T[:, None], groups=len(inputs))
    return F.silu(summed.T)
