"""The part of config.json that the dense families share, under our own names."""

from typing import Any

import msgspec

from headrace.core.errors import ModelError


class Rope(msgspec.Struct, frozen=True):
    """Rotary positions: the base, and how it was stretched."""

    theta: float
    kind: str = "default"
    scaling: dict[str, Any] = {}


class TextConfig(msgspec.Struct, frozen=True):
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    is_tied: bool
    windows: tuple[int | None, ...]  # one per layer

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def read_text_config(config: dict[str, Any], windows: tuple[int | None, ...]) -> TextConfig:
    """`windows` is the family's own rule; its length is the number of layers."""
    heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']} is not supported here; silu is.")
    return TextConfig(
        hidden_size=hidden,
        mlp_size=_number(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=_number(config, "vocab_size"),
        max_positions=_number(config, "max_position_embeddings"),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config),
        is_tied=config.get("tie_word_embeddings", False),
        windows=windows,
    )


def num_layers(config: dict[str, Any]) -> int:
    return _number(config, "num_hidden_layers")


def _number(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has no valid {key}; download it again.", "model_corrupt")
    return value


def _rope(config: dict[str, Any]) -> Rope:
    """Reads the present form (rope_parameters) and the older one (rope_theta, rope_scaling)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta", 10_000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    return Rope(theta=float(theta), kind=kind, scaling=scaling)
