"""Reads the parts of config.json that the text models share."""

from typing import Any

import msgspec

from headrace_common.cache import LayerCache, ModelCache
from headrace_common.errors import ModelError

_ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "proportional": (),
}
"""Supported kinds of rotary positions, and the parameters that each kind requires."""

Windows = tuple[int | None, ...]
"""For each layer, how many positions a token attends to, including its own; None means all."""


class Rope(msgspec.Struct, frozen=True):
    """Settings of rotary positions: the base, and how they are scaled to a longer context."""

    theta: float
    # The context length before scaling.
    original_positions: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # The share of pairs that the kind `proportional` rotates.
    share: float = 1.0
    # How many pairs each axis rotates, in models whose positions have three axes.
    mrope_section: tuple[int, ...] = (11, 11, 10)


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # How many numbers at the start of each head are rotated.
    rotary_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    is_tied: bool
    windows: Windows
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    # For each layer, whether it rotates queries and keys; None means that all layers do.
    rotated: tuple[bool, ...] | None = None
    # Rotary settings of the layers with a window; None if all layers use `rope`.
    local_rope: Rope | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def cache(self) -> ModelCache:
        """Return the cache of a model in which every layer attends."""
        heads, dim = self.num_kv_heads, self.head_dim
        return tuple(LayerCache(heads, dim, dim, window) for window in self.windows)


def read_text_config(
    config: dict[str, Any],
    windows: Windows,
    has_qkv_bias: bool = False,
    has_out_bias: bool = False,
    has_mlp_bias: bool = False,
    can_rotate_part: bool = False,
) -> TextConfig:
    """Read a config; ModelError if the config is not supported.

    The other parameters are settings that each model family determines separately.
    """
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"Activation {config['hidden_act']} is not supported natively; the only supported "
            "activation is silu."
        )
    head_dim = config.get("head_dim") or hidden // heads
    rope, fraction = read_rope(config)
    if fraction != 1 and not can_rotate_part:
        raise ModelError(
            f"A partial_rotary_factor of {fraction:g} is not supported natively for this "
            "architecture; the only supported value is 1."
        )
    return TextConfig(
        hidden_size=hidden,
        mlp_size=positive(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * fraction),
        vocab_size=positive(config, "vocab_size"),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        is_tied=config.get("tie_word_embeddings", False),
        windows=windows,
        has_qkv_bias=has_qkv_bias,
        has_out_bias=has_out_bias,
        has_mlp_bias=has_mlp_bias,
    )


def layer_windows(config: dict[str, Any], window: int | None) -> Windows:
    """Return `window` for some layers and None for the others.

    If the config has `layer_types`, the window applies to the layers with sliding attention.
    Otherwise, the window applies from layer `max_window_layers` on.
    """
    layers = positive(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds:
        if len(kinds) != layers:
            raise ModelError(
                f"config.json has {len(kinds)} layer_types for {layers} layers; download it again.",
                "model_corrupt",
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(layers))


def positive(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has no valid {key}; download it again.", "model_corrupt")
    return value


def read_rope(config: dict[str, Any]) -> tuple[Rope, float]:
    """Return the rotary settings, and the fraction of each head that is rotated.

    Reads the current config key (rope_parameters) and the older keys (rope_theta, rope_scaling).
    Raises ModelError if a setting is invalid or not supported.
    """
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    given = {key: value for key, value in given.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    fraction = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"Rope type {kind} is not supported natively. Supported types: "
            f"{', '.join(_ROPE_KINDS)}."
        )
    for key in _ROPE_KINDS[kind]:
        if key not in given:
            raise ModelError(
                f"config.json has no {key} for {kind} rope; download it again.", "model_corrupt"
            )
    given["theta"] = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
    given["original_positions"] = (
        config.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or positive(config, "max_position_embeddings")
    )
    if kind == "yarn" and "factor" not in given:
        given["factor"] = positive(config, "max_position_embeddings") / given["original_positions"]
    if kind == "proportional":
        given["share"], fraction = fraction, 1.0
    try:
        return msgspec.convert(given | {"kind": kind}, Rope), msgspec.convert(fraction, float)
    except msgspec.ValidationError as error:
        raise ModelError(
            "config.json has invalid rope parameters; download it again.",
            "model_corrupt",
        ) from error
