"""Reads settings of OLMo 3, Phi-3 and Granite for which a GGUF file has other fields."""

from typing import Any

from headrace_common.checkpoints.gguf_header import GgufHeader
from headrace_common.errors import ModelError


def own_settings(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in transformers' format, to be added to `config`.

    Raises ModelError if a setting is not supported natively.
    """
    read = {"granite": _granite, "olmo2": _olmo, "phi3": _phi3}.get(header.architecture)
    return read(header, config) if read else {}


def _granite(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    if not header.own("rope.scaling.finetuned", True):
        raise ModelError("Granite without rotary positions is not supported natively.")
    # The files of Granite 4 have a list with the number of each layer.
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list):
        return {}
    if len(set(heads)) != 1:
        raise ModelError("Granite with different numbers of heads is not supported natively.")
    return {"num_key_value_heads": heads[0]}


def _olmo(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    if not config.get("sliding_window"):
        return {"sliding_window": None}
    layers = config["num_hidden_layers"]
    pattern = config.get("sliding_window_pattern", 4)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": [kinds[bool(has_window)] for has_window in pattern[:layers]],
    }


def _phi3(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    if "rope_factors_long.weight" in header.tensors:
        raise ModelError("Longrope is not supported natively.")
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # A window of 0 means that all positions are seen.
    return {
        "partial_rotary_factor": header.own("rope.dimension_count", dim) / dim,
        "sliding_window": config.get("sliding_window") or None,
    }
