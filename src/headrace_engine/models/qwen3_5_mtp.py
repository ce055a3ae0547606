"""The MTP layer (multi-token prediction) of Qwen3.5 and Qwen3-Next, which drafts for its model.

The layer predicts the token after the next token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace_engine.models.layers import ShiftedNorm
from headrace_engine.models.qwen3_5 import Qwen35
from headrace_engine.models.step import Step


class Qwen35Mtp(nn.Module):
    """Predicts the token after the next one, from a hidden state and the next token's embedding.

    The model's embeddings and output layer are used too; they are not part of this module.
    """

    def __init__(self, model: Qwen35) -> None:
        """Take the layer, the last norm and the rotary settings from a model with one layer."""
        super().__init__()
        hidden, eps = model.norm.weight.shape[0], model.norm.eps
        self.cache = model.cache
        self.weights = _mtp_weights(model.weights)
        self.embedding_norm = ShiftedNorm(hidden, eps)
        self.hidden_norm = ShiftedNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers, self.norm, self.rotary = model.layers, model.norm, model.rotary

    @property
    def sinks(self) -> Sequence[Tensor]:
        """Return the attention sinks of each layer, float32 [heads]; empty if there are none."""
        return ()

    def forward(self, embedded: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Return hidden states [tokens, hidden], which the model's output layer takes.

        embedded: the embeddings of tokens, [tokens, hidden]; hidden: for each token, what the
        model's last norm returned for the token before, or what this method returned for it.
        """
        pairs = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        x = step.linear(self.fc, pairs)
        rotate = self.rotary(step.positions)
        for layer in self.layers:
            x = layer(x, rotate, step)
        return self.norm(x)


def _mtp_weights(weights: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the weight table of the MTP layer, from the weight table of the model's layers."""
    layers = {
        name: tuple(source.replace("model.layers.", "mtp.layers.", 1) for source in sources)
        for name, sources in weights.items()
        if name.startswith("layers.")
    }
    return layers | {
        "embedding_norm": ("mtp.pre_fc_norm_embedding",),
        "hidden_norm": ("mtp.pre_fc_norm_hidden",),
        "fc": ("mtp.fc",),
        "norm": ("mtp.norm",),
    }
