"""Reads the settings of Gemma 4, some of which have a value for each layer, from a GGUF file."""

from typing import Any

from headrace_common.checkpoints.gguf_header import GgufHeader
from headrace_common.errors import ModelError

_FULL, _LOCAL = "full_attention", "sliding_attention"
# A pair whose angles are divided by at least this number never rotates.
_NEVER = 1e9


def gemma4_config(header: GgufHeader, divisors: tuple[float, ...]) -> dict[str, Any]:
    """Return the settings in transformers' format.

    `divisors` has a number for each pair of a head in layers without a window, or is empty.
    """
    own, tensors = header.own, header.tensors
    num_layers = own("block_count")

    def each(key: str) -> list[Any]:
        value = own(key)
        return value[:num_layers] if isinstance(value, list) else [value] * num_layers

    kinds = [_LOCAL if is_local else _FULL for is_local in each("attention.sliding_window_pattern")]
    kv_heads, widths = each("attention.head_count_kv"), each("feed_forward_length")
    full, local, dim = kinds.index(_FULL), kinds.index(_LOCAL), own("attention.key_length")
    heads = {"head_dim": dim, "num_key_value_heads": kv_heads[full]}
    own_inputs = tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": kinds,
        "head_dim": own("attention.key_length_swa"),
        "num_key_value_heads": kv_heads[local],
        "per_layer_config": {str(n): heads for n, kind in enumerate(kinds) if kind == _FULL},
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": own("attention.shared_kv_layers", 0),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "hidden_size_per_layer_input": own("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": own_inputs.shape[0] if own_inputs else 0,
        "enable_moe_block": bool(own("expert_count", 0)),
        "top_k_experts": own("expert_used_count"),
        "rope_parameters": {
            _LOCAL: {"rope_type": "default", "rope_theta": own("rope.freq_base_swa", 10_000.0)},
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": own("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _share(divisors, dim // 2),
            },
        },
    }


def _share(divisors: tuple[float, ...], num_pairs: int) -> float:
    """Return the share of a head's pairs that rotate. Their frequencies are divided by 1."""
    if not divisors:
        return 1.0
    num = divisors.count(1.0)
    if len(divisors) != num_pairs or any(one < _NEVER for one in divisors[num:]):
        raise ModelError(
            "The GGUF file scales its rotary positions in an unknown way (rope_freqs.weight)."
        )
    return num / num_pairs
