"""The part of config.json that the dense families share, under our own names."""

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
}
"""Kinds of rotary positions, and what each must be given."""

Windows = tuple[int | None, ...]
"""Per layer how many positions a token sees, its own included; None: all."""


class Rope(msgspec.Struct, frozen=True):
    """Rotary positions: the base, and how they are stretched over a longer context."""

    theta: float
    original_positions: int  # context before stretching
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
    mrope_section: tuple[int, ...] = (11, 11, 10)  # pairs per axis, where positions have three


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # leading numbers of a head that are turned by position
    vocab_size: int
    norm_eps: float
    rope: Rope
    is_tied: bool
    windows: Windows
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def cache(self) -> ModelCache:
        """The cache where every layer attends."""
        heads, dim = self.num_kv_heads, self.head_dim
        return tuple(LayerCache(heads, dim, dim, window) for window in self.windows)


def read_text_config(
    config: dict[str, Any],
    windows: Windows,
    has_qkv_bias: bool = False,
    has_out_bias: bool = False,
    has_mlp_bias: bool = False,
    can_turn_part: bool = False,
) -> TextConfig:
    """Reads a config; the flags say what it leaves to the family. ModelError if unsupported."""
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"Activation {config['hidden_act']} is not supported here; silu is.")
    head_dim = config.get("head_dim") or hidden // heads
    rope, share = read_rope(config)
    if share != 1 and not can_turn_part:
        raise ModelError(
            f"Rotary positions over {share:g} of a head are not supported here; "
            "those over the whole of it are."
        )
    return TextConfig(
        hidden_size=hidden,
        mlp_size=positive(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * share),
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
    """`window` for the layers that layer_types names, else for those from max_window_layers on."""
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
    """Reads the present form (rope_parameters) and the older one (rope_theta, rope_scaling).

    With the share of a head that is turned.
    """
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    given = {key: value for key, value in given.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    share = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"Rotary positions of kind {kind} are not supported here; {', '.join(_ROPE_KINDS)} are."
        )
    for key in _ROPE_KINDS[kind]:
        if key not in given:
            raise ModelError(
                f"config.json gives {kind} rope no {key}; download it again.", "model_corrupt"
            )
    given["theta"] = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
    given["original_positions"] = (
        config.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or positive(config, "max_position_embeddings")
    )
    if kind == "yarn" and "factor" not in given:
        given["factor"] = positive(config, "max_position_embeddings") / given["original_positions"]
    try:
        return msgspec.convert(given | {"kind": kind}, Rope), msgspec.convert(share, float)
    except msgspec.ValidationError as error:
        raise ModelError(
            "config.json has rope parameters that are no numbers; download it again.",
            "model_corrupt",
        ) from error
