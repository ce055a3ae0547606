"""OLMo 2: Llama with norms after each sublayer, and norms of all queries and of all keys."""

from typing import Any

from torch import Tensor, nn

from headrace_engine.models.layers import GatedMLP, RMSNorm, Rotation
from headrace_engine.models.llama import WEIGHTS as _LLAMA
from headrace_engine.models.llama import Llama, LlamaAttention
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import TextConfig

WEIGHTS = {name: sources for name, sources in _LLAMA.items() if "input_norm" not in name} | {
    "layers.*.attention.q_norm": ("model.layers.*.self_attn.q_norm",),
    "layers.*.attention.k_norm": ("model.layers.*.self_attn.k_norm",),
    "layers.*.post_mlp_norm": ("model.layers.*.post_feedforward_layernorm",),
}


class Olmo2Attention(LlamaAttention):
    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.sizes = [heads * self.dim for heads in self.heads]
        self.q_norm = RMSNorm(self.sizes[0], config.norm_eps)
        self.k_norm = RMSNorm(self.sizes[1], config.norm_eps)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        q, k, v = step.linear(self.qkv, x).split(self.sizes, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)  # a norm spans all heads of a token
        q, k, v = (each.view(len(x), -1, self.dim) for each in (q, k, v))
        # q: [tokens, heads, dim], k and v: [tokens, kv_heads, dim]
        out = step.attend(self.layer, rotate(q), rotate(k), v).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]


class Olmo2Layer(nn.Module):
    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.attention = Olmo2Attention(config, layer)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)
        self.post_mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        x = x + self.post_norm(self.attention(x, rotate, step))
        return x + self.post_mlp_norm(self.mlp(x, step))


class Olmo2(Llama):
    weights = WEIGHTS

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(Olmo2Layer(config, layer) for layer in layers)

    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        return Llama.read({"rms_norm_eps": 1e-5} | config)
