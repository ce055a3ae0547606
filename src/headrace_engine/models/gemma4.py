"""Gemma 4: Gemma 3 with layers that may share keys and values, and have own inputs and experts.

Layers with a window and layers without one have heads of different sizes. The last layers may have
no keys and values of their own: they attend to those of an earlier layer of their kind. In small
models, each layer also gets its own input: a vector that depends only on the token (per-layer
embeddings).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace_common.cache import LayerCache, ModelCache
from headrace_common.errors import ModelError
from headrace_engine.models.experts import ExpertsConfig, RoutedMLP, read_experts
from headrace_engine.models.gemma2 import WEIGHTS as _GEMMA2
from headrace_engine.models.gemma2 import read_gemma_config
from headrace_engine.models.layers import (
    GeluMLP,
    RMSNorm,
    Rotary,
    Rotation,
    ScaledEmbedding,
    UnitNorm,
)
from headrace_engine.models.step import BARE, Step
from headrace_engine.models.text_config import TextConfig, positive

_Q, _K, _V = (f"model.layers.*.self_attn.{name}_proj" for name in "qkv")
WEIGHTS = _GEMMA2 | {
    "layers.*.attention.qkv": (_Q, _K, _V),
    "layers.*.attention.qk": (_Q, _K),
    "layers.*.attention.q": (_Q,),
    "layers.*.attention.q_norm": ("model.layers.*.self_attn.q_norm",),
    "layers.*.attention.k_norm": ("model.layers.*.self_attn.k_norm",),
    "layers.*.scale": ("model.layers.*",),
    "layers.*.dense_norm": ("model.layers.*.post_feedforward_layernorm_1",),
    "layers.*.experts_norm": ("model.layers.*.pre_feedforward_layernorm_2",),
    "layers.*.post_experts_norm": ("model.layers.*.post_feedforward_layernorm_2",),
    "layers.*.routed": ("model.layers.*.router",),
    "layers.*.routed.mlp.router": ("model.layers.*.router.proj",),
    "layers.*.routed.mlp.experts.*.gate_up": (
        "model.layers.*.experts.*.gate_proj",
        "model.layers.*.experts.*.up_proj",
    ),
    "layers.*.routed.mlp.experts.*.down": ("model.layers.*.experts.*.down_proj",),
    "layers.*.own.gate": ("model.layers.*.per_layer_input_gate",),
    "layers.*.own.out": ("model.layers.*.per_layer_projection",),
    "layers.*.own.norm": ("model.layers.*.post_per_layer_input_norm",),
    "inputs.embed": ("model.embed_tokens_per_layer",),
    "inputs.project": ("model.per_layer_model_projection",),
    "inputs.norm": ("model.per_layer_projection_norm",),
}

Kept = dict[int, tuple[Tensor, Tensor]]
"""The keys and values of a step [tokens, kv_heads, dim] that later layers use, by layer."""


class Gemma4Config(msgspec.Struct, frozen=True, kw_only=True):
    # The settings of layers with a window, and of layers without one.
    local: TextConfig
    full: TextConfig
    # For each layer, the layer whose keys and values it attends to: itself or an earlier layer.
    sources: tuple[int, ...]
    # Whether layers without a window use the projection of their keys as values, too.
    has_keys_as_values: bool
    # Whether the MLPs of layers that share keys and values are twice as wide.
    has_wide_mlps: bool
    # The size of a layer's own input, and the number of tokens that have one; 0 without own inputs.
    own_size: int
    own_vocab_size: int
    experts: ExpertsConfig | None
    logit_cap: float | None

    @property
    def num_layers(self) -> int:
        return len(self.sources)

    def layer(self, layer: int) -> TextConfig:
        """Return the settings of one layer."""
        text = self.full if self.local.windows[layer] is None else self.local
        is_wide = self.has_wide_mlps and self.sources[layer] != layer
        return msgspec.structs.replace(text, mlp_size=text.mlp_size * (1 + is_wide))

    @property
    def cache(self) -> ModelCache:
        """Return the cache; a layer that shares keys and values has none of its own."""
        return tuple(
            self.layer(layer).cache[layer] if source == layer else LayerCache()
            for layer, source in enumerate(self.sources)
        )


class Gemma4Attention(nn.Module):
    def __init__(self, config: Gemma4Config, layer: int) -> None:
        super().__init__()
        c, self.source = config.layer(layer), config.sources[layer]
        heads, kv_heads = c.num_heads, c.num_kv_heads
        self.dim = c.head_dim

        def project(*heads: int) -> nn.Linear:
            return nn.Linear(c.hidden_size, sum(heads) * c.head_dim, bias=c.has_qkv_bias)

        self.is_shared = self.source != layer
        self.has_values = not (config.has_keys_as_values and c.windows[layer] is None)
        if self.is_shared:
            self.heads: tuple[int, ...] = (heads,)
            self.q = project(*self.heads)
        elif self.has_values:
            self.heads = (heads, kv_heads, kv_heads)
            self.qkv = project(*self.heads)
        else:
            self.heads = (heads, kv_heads)
            self.qk = project(*self.heads)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        if not self.is_shared:
            self.k_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.v_norm = UnitNorm(c.head_dim, c.norm_eps)
        self.out = nn.Linear(heads * c.head_dim, c.hidden_size, bias=c.has_out_bias)

    def forward(self, x: Tensor, rotate: Rotation, step: Step, kept: Kept) -> Tensor:
        project = self.q if self.is_shared else self.qkv if self.has_values else self.qk
        q, *kv = step.linear(project, x).view(len(x), -1, self.dim).split(self.heads, dim=1)
        # `attend` divides scores by the square root of `dim`; this model does not divide them.
        q = rotate(self.q_norm(q)) * self.dim**0.5  # [tokens, heads, dim]
        if kv:
            # [tokens, kv_heads, dim]; only keys are rotated
            kept[self.source] = rotate(self.k_norm(kv[0])), self.v_norm(kv[-1])
        # A layer that shares keys and values writes them again, which changes nothing.
        out = step.attend(self.source, q, *kept[self.source]).flatten(1)
        return step.linear(self.out, out)  # [tokens, hidden]


class GeluExperts(RoutedMLP):
    expert = GeluMLP


class Gemma4Experts(nn.Module):
    """Experts with a scale for each expert's output. The router reads x normed and scaled."""

    def __init__(self, text: TextConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.mlp = GeluExperts(text, experts)
        self.norm = UnitNorm(text.hidden_size, text.norm_eps)
        self.scale = nn.Parameter(torch.empty(text.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(experts.num))

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """Choose the experts by x, and apply them to `normed`."""
        scores = self.mlp.router(self.norm(x) * self.scale * x.shape[1] ** -0.5)
        return self.mlp(normed, BARE, scores, self.per_expert_scale)


class OwnInput(nn.Module):
    """Gates a layer's own input by x, projects it, and adds the result to x."""

    def __init__(self, text: TextConfig, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(text.hidden_size, size, bias=False)
        self.out = nn.Linear(size, text.hidden_size, bias=False)
        self.norm = RMSNorm(text.hidden_size, text.norm_eps)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        gated = F.gelu(self.gate(x), approximate="tanh") * own  # [tokens, size]
        return x + self.norm(self.out(gated))


class OwnInputs(nn.Module):
    """Computes each layer's own input from the tokens and from their embeddings."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        c, size = config.full, config.own_size
        self.embed = ScaledEmbedding(config.own_vocab_size, config.num_layers * size, scale_of=size)
        self.project = nn.Linear(c.hidden_size, config.num_layers * size, bias=False)
        self.norm = RMSNorm(size, c.norm_eps)

    def forward(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Return [tokens, layers, size]."""
        size = self.norm.weight.shape[0]
        projected = self.project(x) * x.shape[1] ** -0.5
        projected = self.norm(projected.view(len(x), -1, size))
        return (projected + self.embed(token_ids).view(len(x), -1, size)) * 2**-0.5


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.layer_scalar


class Gemma4Layer(nn.Module):
    def __init__(self, config: Gemma4Config, layer: int) -> None:
        super().__init__()
        c = config.layer(layer)
        size, eps = c.hidden_size, c.norm_eps
        self.input_norm, self.post_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attention = Gemma4Attention(config, layer)
        self.mlp_norm, self.post_mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.mlp = GeluMLP(c)
        self.has_experts, self.has_own = config.experts is not None, config.own_size > 0
        if config.experts is not None:
            self.dense_norm, self.experts_norm = RMSNorm(size, eps), RMSNorm(size, eps)
            self.routed = Gemma4Experts(c, config.experts)
            self.post_experts_norm = RMSNorm(size, eps)
        if self.has_own:
            self.own = OwnInput(c, config.own_size)
        self.scale = LayerScale()

    def forward(
        self, x: Tensor, rotate: Rotation, step: Step, kept: Kept, own: Tensor | None
    ) -> Tensor:
        x = x + self.post_norm(self.attention(self.input_norm(x), rotate, step, kept))
        out = self.mlp(self.mlp_norm(x), step)
        if self.has_experts:
            routed = self.routed(x, self.experts_norm(x))
            out = self.dense_norm(out) + self.post_experts_norm(routed)
        x = x + self.post_mlp_norm(out)
        return self.scale(x if own is None else self.own(x, own))


class Gemma4(nn.Module):
    weights = WEIGHTS

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        c = config.full
        self.cache = config.cache
        self.embed = ScaledEmbedding(c.vocab_size, c.hidden_size)
        if config.own_size:
            self.inputs = OwnInputs(config)
        self.layers = nn.ModuleList(Gemma4Layer(config, n) for n in range(config.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.is_tied:
            self.head.weight = self.embed.weight
        self.rotary, self.local_rotary = Rotary(c), Rotary(config.local)
        self.cap = config.logit_cap
        self.windows, self.has_own = c.windows, config.own_size > 0
        # Published files also have keys and values for layers that do not use them.
        self.unused = frozenset(
            f"model.layers.{layer}.self_attn.{name}.weight"
            for layer, source in enumerate(config.sources)
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
            if source != layer
        )

    @staticmethod
    def read(config: dict[str, Any]) -> Gemma4Config:
        """Read the config of a text model, or the text part of a multimodal model's config."""
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
        return _read(_DEFAULTS | tied | (config.get("text_config") or config))

    @property
    def sinks(self) -> Sequence[Tensor]:
        """Return the attention sinks of each layer, float32 [heads]; empty if there are none."""
        return ()

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return the hidden states [tokens, hidden] that `logits` takes."""
        x = self.embed(token_ids)
        inputs = self.inputs(token_ids, x) if self.has_own else None
        rotate, rotate_local = self.rotary(step.positions), self.local_rotary(step.positions)
        kept: Kept = {}
        for number, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            own = None if inputs is None else inputs[:, number]  # [tokens, size]
            x = layer(x, rotate if window is None else rotate_local, step, kept, own)
        return self.norm(x)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of the hidden states in `rows`, float32 [rows, vocabulary]."""
        logits = self.head(rows).float()
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class Gemma4Unified(Gemma4):
    """The 12B model: like the other dense models, but its config has different defaults."""

    @staticmethod
    def read(config: dict[str, Any]) -> Gemma4Config:
        text = _UNIFIED | (config.get("text_config") or config)
        return Gemma4.read(config | {"text_config": text | {"hidden_size_per_layer_input": 0}})


_UNIFIED = {"sliding_window": 1024}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_FULL, _LOCAL = "full_attention", "sliding_attention"
_ROPES = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def _read(config: dict[str, Any]) -> Gemma4Config:
    if config.get("use_bidirectional_attention") == "all":
        raise ModelError("Bidirectional attention is not supported natively.")
    num_layers = positive(config, "num_hidden_layers")
    kinds = list(config.get("layer_types") or ())
    kinds = kinds or [_FULL if layer % 6 == 5 else _LOCAL for layer in range(num_layers)]
    # The last layer never has a window.
    kinds[-1] = _FULL
    ropes = _ROPES | (config.get("rope_parameters") or {})
    # Bidirectional attention of image tokens does not concern texts.
    given = config | {"layer_types": kinds, "use_bidirectional_attention": None}
    local, full = (
        read_gemma_config(given | {"rope_scaling": None, "rope_parameters": ropes[kind]}, 6)
        for kind in (_LOCAL, _FULL)
    )
    dim, kv_heads = _full_heads(config, kinds)
    full_text = msgspec.structs.replace(
        full.text, head_dim=dim, rotary_dim=dim, num_kv_heads=kv_heads
    )
    experts = None
    if config.get("enable_moe_block"):
        chosen = {"num_experts_per_tok": config.get("top_k_experts")}
        experts = read_experts(config | chosen, sums_to_one=True)
    own_size = config["hidden_size_per_layer_input"] or 0
    return Gemma4Config(
        local=local.text,
        full=full_text,
        sources=_sources(kinds, config.get("num_kv_shared_layers") or 0),
        has_keys_as_values=config.get("attention_k_eq_v", False),
        has_wide_mlps=config.get("use_double_wide_mlp", False),
        own_size=own_size,
        own_vocab_size=positive(config, "vocab_size_per_layer_input") if own_size else 0,
        experts=experts,
        logit_cap=full.logit_cap,
    )


def _full_heads(config: dict[str, Any], kinds: list[str]) -> tuple[int, int]:
    """Return the size of a head, and the number of key heads, of layers without a window.

    Published configs have one setting for all these layers. transformers saves one per layer.
    """
    kv_heads = config.get("num_key_value_heads") or positive(config, "num_attention_heads")
    if (each := config.get("per_layer_config")) is None:
        dim = config.get("global_head_dim") or 512
        own = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return dim, own or kv_heads
    found: dict[str, set[tuple[int, int]]] = {_FULL: set(), _LOCAL: set()}
    # Numbers of layers may have leading zeros.
    by_layer = {key.lstrip("0") or "0": own for key, own in each.items()}
    for layer, kind in enumerate(kinds):
        own = by_layer.get(str(layer)) or {}
        heads = own.get("head_dim") or config["head_dim"], own.get("num_key_value_heads")
        found[kind].add((heads[0], heads[1] or kv_heads))
    if found[_LOCAL] - {(config["head_dim"], kv_heads)} or len(found[_FULL]) != 1:
        raise ModelError(
            "Layers of one type with different heads (number or size) are not supported natively."
        )
    return found[_FULL].pop()


def _sources(kinds: list[str], num_shared: int) -> tuple[int, ...]:
    """Return for each layer the layer whose keys and values it attends to.

    Each of the last `num_shared` layers attends to those of the last layer of its kind that has its
    own.
    """
    first = len(kinds) - num_shared
    lasts = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if first < 1 or not set(kinds) <= lasts.keys():
        raise ModelError(
            f"config.json shares keys and values of {num_shared} of {len(kinds)} layers, but no "
            "earlier layer of their kind has any; check the file.",
            "model_corrupt",
        )
    return tuple(layer if layer < first else lasts[kind] for layer, kind in enumerate(kinds))
