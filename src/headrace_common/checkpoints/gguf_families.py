"""Reads settings of Gemma 3, Granite, OLMo 3 and Phi-3 for which a GGUF file has other fields."""

from typing import Any

from headrace_common.checkpoints.gguf_header import GgufHeader
from headrace_common.errors import ModelError


def own_settings(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in transformers' format, to be added to `config`.

    Raises ModelError if a setting is not supported natively.
    """
    read = _READERS.get(header.architecture)
    return read(header, config) if read else {}


def _gemma3(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    # A file without a window has no windowed layers; transformers would assume a default window.
    if not config.get("sliding_window"):
        return {"sliding_window_pattern": 1}
    pattern = config.get("sliding_window_pattern")
    return _layer_types(pattern, config) if isinstance(pattern, list) else {}


def _granite(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    if not header.own("rope.scaling.finetuned", True):
        raise ModelError("Granite without rotary positions is not supported natively.")
    # The files of Granite 4 have a list with the number of each layer.
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list):
        return {}
    if len(set(heads)) != 1:
        raise ModelError(
            "Granite with other numbers of heads in other layers is not supported natively."
        )
    return {"num_key_value_heads": heads[0]}


def _olmo(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    if not config.get("sliding_window"):
        return {"sliding_window": None}
    layers = config["num_hidden_layers"]
    pattern = config.get("sliding_window_pattern", 4)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return {"architectures": ["Olmo3ForCausalLM"]} | _layer_types(pattern, config)


def _layer_types(pattern: list[Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the kind of each layer; `pattern` says for each layer whether it has a window."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    has_window = map(bool, pattern[: config["num_hidden_layers"]])
    return {"layer_types": [kinds[it] for it in has_window]}


def _phi3(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    if "rope_factors_long.weight" in header.tensors:
        raise ModelError("Longrope is not supported natively.")
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # A window of 0 means that all positions are seen.
    return {
        "partial_rotary_factor": header.own("rope.dimension_count", dim) / dim,
        "sliding_window": config.get("sliding_window") or None,
    }


_READERS = {"gemma3": _gemma3, "granite": _granite, "olmo2": _olmo, "phi3": _phi3}
