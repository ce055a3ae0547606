"""The text model of Qwen3.5: most layers are gated delta nets, a few are gated attention."""

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor, nn

from headrace_common.cache import LayerCache, ModelCache
from headrace_common.errors import ModelError
from headrace_engine.models.layers import (
    Convolution,
    DeltaGates,
    Embedding,
    GatedMLP,
    GatedNorm,
    Rotary,
    Rotation,
    ShiftedNorm,
    SigmoidGate,
)
from headrace_engine.models.qwen3 import WEIGHTS as _QWEN3
from headrace_engine.models.step import Step
from headrace_engine.models.text_config import TextConfig, positive, read_text_config

_ATTENTION, _DELTA_NET = "full_attention", "linear_attention"
WEIGHTS = _QWEN3 | {
    "layers.*.delta_net.project": (
        "model.layers.*.linear_attn.in_proj_qkv",
        "model.layers.*.linear_attn.in_proj_z",
        "model.layers.*.linear_attn.in_proj_b",
        "model.layers.*.linear_attn.in_proj_a",
    ),
    "layers.*.delta_net.convolution": ("model.layers.*.linear_attn.conv1d",),
    "layers.*.delta_net.gates": ("model.layers.*.linear_attn",),
    "layers.*.delta_net.norm": ("model.layers.*.linear_attn.norm",),
    "layers.*.delta_net.out": ("model.layers.*.linear_attn.out_proj",),
}


class Qwen35Config(msgspec.Struct, frozen=True):
    text: TextConfig
    # The kind of each layer.
    kinds: tuple[str, ...]
    # The remaining fields describe the delta nets.
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    # How many inputs the convolution spans.
    width: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def cache(self) -> ModelCache:
        delta_net = LayerCache(
            state=(self.num_value_heads, self.key_dim, self.value_dim),
            inputs=(self.width - 1, sum(self.channels)),
        )
        return tuple(
            attention if kind == _ATTENTION else delta_net
            for kind, attention in zip(self.kinds, self.text.cache, strict=True)
        )

    @property
    def channels(self) -> tuple[int, int, int]:
        """Return the number of channels of q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim


class GatedAttention(nn.Module):
    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        c, self.layer = config, layer
        self.dim = c.head_dim
        self.sizes = tuple(
            n * c.head_dim for n in (2 * c.num_heads, c.num_kv_heads, c.num_kv_heads)
        )
        self.qkv = nn.Linear(c.hidden_size, sum(self.sizes), bias=c.has_qkv_bias)
        self.out = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.has_out_bias)
        self.q_norm = ShiftedNorm(c.head_dim, c.norm_eps)
        self.k_norm = ShiftedNorm(c.head_dim, c.norm_eps)
        self.gate = SigmoidGate()

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        qkv = step.linear(self.qkv, x).split(self.sizes, dim=1)
        q, k, v = (part.view(len(x), -1, self.dim) for part in qkv)
        q, gate = q.view(len(x), -1, 2, self.dim).unbind(2)  # [tokens, heads, dim]
        q = rotate(self.q_norm(q))
        k = rotate(self.k_norm(k))  # [tokens, kv_heads, dim]
        attended = step.attend(self.layer, q, k, v)  # [tokens, heads, dim]
        return step.linear(self.out, self.gate(attended, gate).flatten(1))  # [tokens, hidden]


class GatedDeltaNet(nn.Module):
    def __init__(self, config: Qwen35Config, layer: int) -> None:
        super().__init__()
        c, self.layer = config, layer
        hidden, values = c.text.hidden_size, c.channels[2]
        self.dims = (c.key_dim, c.key_dim, c.value_dim)
        self.channels = c.channels
        self.sizes = (sum(c.channels), values, c.num_value_heads, c.num_value_heads)
        self.project = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.convolution = Convolution(layer, sum(c.channels), c.width)
        self.gates = DeltaGates(c.num_value_heads)
        self.norm = GatedNorm(c.value_dim, c.text.norm_eps)
        self.out = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        mixed, z, b, a = step.linear(self.project, x).split(self.sizes, dim=1)
        parts = self.convolution(mixed, step).split(self.channels, dim=1)
        q, k, v = (
            part.view(len(x), -1, dim) for part, dim in zip(parts, self.dims, strict=True)
        )  # [tokens, key_heads, key_dim] twice, [tokens, value_heads, value_dim]
        decay, beta = self.gates(a, b)  # [tokens, value_heads]
        out = step.delta_rule(self.layer, (q, k, v), decay, beta)  # the shape of v
        out = self.norm(out, z.view(v.shape)).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]


class Qwen35Layer(nn.Module):
    def __init__(self, config: Qwen35Config, layer: int) -> None:
        super().__init__()
        c, kind = config.text, config.kinds[layer]
        self.input_norm = ShiftedNorm(c.hidden_size, c.norm_eps)
        if kind == _ATTENTION:
            self.attention = GatedAttention(c, layer)
        else:
            self.delta_net = GatedDeltaNet(config, layer)
        self.post_norm = ShiftedNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c)
        self.kind = kind

    def forward(self, x: Tensor, rotate: Rotation, step: Step) -> Tensor:
        mixer = self.attention if self.kind == _ATTENTION else self.delta_net
        x = x + mixer(self.input_norm(x), rotate, step)
        return x + self.mlp(self.post_norm(x), step)


class Qwen35(nn.Module):
    weights = WEIGHTS

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        c = config.text
        self.cache = config.cache
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Qwen35Layer(config, n) for n in range(config.num_layers))
        self.norm = ShiftedNorm(c.hidden_size, c.norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.is_tied:
            self.head.weight = self.embed.weight
        self.rotary = Rotary(c)

    @staticmethod
    def read(config: dict[str, Any]) -> Qwen35Config:
        """Read the config of a text model, or the text part of a vision-language model's config."""
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        text = {"partial_rotary_factor": 0.25} | tied | (config.get("text_config") or config)
        kinds = _kinds(text)
        text = _DEFAULTS | {key: value for key, value in text.items() if value is not None}
        has_bias = text.get("attention_bias", False)
        key_heads = positive(text, "linear_num_key_heads")
        value_heads = positive(text, "linear_num_value_heads")
        if value_heads % key_heads:
            raise ModelError(
                f"{value_heads} value heads are not a multiple of {key_heads} key heads; check "
                "config.json.",
                "model_corrupt",
            )
        return Qwen35Config(
            read_text_config(
                text,
                windows=(None,) * len(kinds),
                has_qkv_bias=has_bias,
                has_out_bias=has_bias,
                can_rotate_part=True,
            ),
            kinds,
            key_heads,
            value_heads,
            positive(text, "linear_key_head_dim"),
            positive(text, "linear_value_head_dim"),
            positive(text, "linear_conv_kernel_dim"),
        )

    @staticmethod
    def with_one_layer(config: Qwen35Config) -> Qwen35Config:
        """Return the config of a model whose only layer has attention, as an MTP layer does."""
        text = msgspec.structs.replace(config.text, windows=(None,))
        return msgspec.structs.replace(config, text=text, kinds=(_ATTENTION,))

    @property
    def sinks(self) -> Sequence[Tensor]:
        """Return the attention sinks of each layer, float32 [heads]; empty if there are none."""
        return ()

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        return self.forward_embedded(self.embed(token_ids), step)

    def forward_embedded(self, x: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] for the embeddings x of tokens or of images."""
        rotate = self.rotary(step.positions)
        for layer in self.layers:
            x = layer(x, rotate, step)
        return self.norm(x)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of the hidden states in `rows`, float32 [rows, vocabulary]."""
        return self.head(rows).float()


_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def _kinds(text: dict[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; by default every fourth layer is attention."""
    layers = positive(text, "num_hidden_layers")
    every = text.get("full_attention_interval") or 4
    kinds = text.get("layer_types") or [
        _DELTA_NET if (layer + 1) % every else _ATTENTION for layer in range(layers)
    ]
    if len(kinds) != layers:
        raise ModelError(
            f"config.json has {len(kinds)} layer_types for {layers} layers; download it again.",
            "model_corrupt",
        )
    if set(kinds) != {_ATTENTION, _DELTA_NET}:
        raise ModelError(
            f"Layer types {', '.join(sorted(set(kinds)))} are not supported natively. "
            f"The layers must be a mix of {_ATTENTION} and {_DELTA_NET}."
        )
    return tuple(kinds)
