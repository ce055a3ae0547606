"""Llama: pre-norm layers of grouped-query attention with rotary positions and a gated MLP."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from headrace_engine.models.layers import Embedding, GatedMLP, RMSNorm, Rotary, Rotation
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import TextConfig, positive, read_text_config

WEIGHTS = {
    "embed": ("model.embed_tokens",),
    "layers.*.input_norm": ("model.layers.*.input_layernorm",),
    "layers.*.attention.qkv": (
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
    ),
    "layers.*.attention.out": ("model.layers.*.self_attn.o_proj",),
    "layers.*.post_norm": ("model.layers.*.post_attention_layernorm",),
    "layers.*.mlp.gate_up": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": ("model.layers.*.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}


class LlamaAttention(nn.Module):
    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        c, self.layer = config, layer
        self.heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        self.dim = c.head_dim
        self.qkv = nn.Linear(c.hidden_size, sum(self.heads) * c.head_dim, bias=c.has_qkv_bias)
        self.out = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.has_out_bias)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        qkv = step.linear(self.qkv, x).view(
            len(x), -1, self.dim
        )  # [tokens, heads + 2 kv_heads, dim]
        q, k, v = qkv.split(self.heads, dim=1)
        q = rotate(q)  # [tokens, heads, dim]
        k = rotate(k)  # [tokens, kv_heads, dim]
        out = step.attend(self.layer, q, k, v).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]


class LlamaLayer(nn.Module):
    def __init__(self, config: TextConfig, attention: nn.Module) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotate, step)
        return x + self.mlp(self.post_norm(x), step)


class Llama(nn.Module):
    weights = WEIGHTS
    attention: type[nn.Module] = LlamaAttention

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        c = config
        self.cache = c.cache
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        attentions = (self.attention(c, layer) for layer in range(c.num_layers))
        self.layers = nn.ModuleList(LlamaLayer(c, attention) for attention in attentions)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.is_tied:
            self.head.weight = self.embed.weight
        self.rotary = Rotary(c)

    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        has_bias = config.get("attention_bias", False)
        return read_text_config(
            config,
            windows=(None,) * positive(config, "num_hidden_layers"),
            has_qkv_bias=has_bias,
            # GGUF files state this bias apart (see gguf_folder.py).
            has_out_bias=config.get("attention_out_bias", has_bias),
            has_mlp_bias=config.get("mlp_bias", False),
        )

    @property
    def sinks(self) -> Sequence[Tensor]:
        """Return the attention sinks of each layer, float32 [heads]; empty if there are none."""
        return ()

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        x = self.embed(token_ids)
        rotate = self.rotary(step.positions)
        for layer in self.layers:
            x = layer(x, rotate, step)
        return self.norm(x)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of the hidden states in `rows`, float32 [rows, vocabulary]."""
        return self.head(rows).float()
