"""gpt-oss: attention with sinks and biases, windows on every other layer, and clamped experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace_common.errors import ModelError
from headrace_engine.models.experts import RoutedMLP, read_experts
from headrace_engine.models.layers import ClampedMLP
from headrace_engine.models.llama import WEIGHTS as _LLAMA
from headrace_engine.models.llama import Llama, LlamaAttention
from headrace_engine.models.qwen3_moe import MoeConfig
from headrace_engine.models.text_config import TextConfig, layer_windows, positive, read_text_config

WEIGHTS = _LLAMA | {
    "layers.*.attention": ("model.layers.*.self_attn",),
    "layers.*.mlp.router": ("model.layers.*.mlp.router",),
    "layers.*.mlp.experts.*.gate_up": (
        "model.layers.*.mlp.experts.*.gate_proj",
        "model.layers.*.mlp.experts.*.up_proj",
    ),
    "layers.*.mlp.experts.*.down": ("model.layers.*.mlp.experts.*.down_proj",),
}


class GptOssAttention(LlamaAttention):
    """Attention whose heads each have a sink: an extra softmax score without a value."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.sinks = nn.Parameter(torch.empty(config.num_heads))


class GptOssExperts(RoutedMLP):
    expert = ClampedMLP


class GptOss(Llama):
    weights = WEIGHTS
    attention = GptOssAttention

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config.text)
        for layer in self.layers:
            layer.mlp = GptOssExperts(config.text, config.experts)

    @property
    def sinks(self) -> Sequence[Tensor]:
        layers: Any = self.layers
        return [layer.attention.sinks.float() for layer in layers]

    @staticmethod
    def read(config: dict[str, Any]) -> MoeConfig:  # type: ignore[override]
        num_layers = positive(config, "num_hidden_layers")
        kinds = config.get("layer_types") or [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
        ]
        config = _DEFAULTS | config | {"layer_types": kinds}
        for key, value in _CLAMPS.items():
            if config.get(key, value) != value:
                raise ModelError(
                    f"A {key} of {config[key]} is not supported natively; the only supported value "
                    f"is {value}."
                )
        has_bias = config["attention_bias"]
        text = read_text_config(
            config,
            windows=layer_windows(config, config["sliding_window"]),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=True,
        )
        sized = config | {"moe_intermediate_size": config["intermediate_size"]}
        experts = read_experts(sized, sums_to_one=True, has_router_bias=True)
        return MoeConfig(text, experts, routed=(True,) * num_layers)


_DEFAULTS = {"attention_bias": True, "sliding_window": 128, "rms_norm_eps": 1e-5, "head_dim": 64}
_CLAMPS = {"swiglu_alpha": ClampedMLP.alpha, "swiglu_limit": ClampedMLP.limit}
