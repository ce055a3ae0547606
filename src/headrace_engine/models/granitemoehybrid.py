"""Dense Granite 4: Granite with one weight for gate and up. Refuses Mamba layers and experts."""

from typing import Any

from headrace_common.errors import ModelError
from headrace_engine.models.granite import Granite, GraniteConfig
from headrace_engine.models.llama import WEIGHTS as _LLAMA
from headrace_engine.models.text_config import positive

WEIGHTS = _LLAMA | {
    "layers.*.mlp.gate_up": ("model.layers.*.shared_mlp.input_linear",),
    "layers.*.mlp.down": ("model.layers.*.shared_mlp.output_linear",),
}


class GraniteMoeHybrid(Granite):
    weights = WEIGHTS

    @staticmethod
    def read(config: dict[str, Any]) -> GraniteConfig:  # type: ignore[override]
        kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
        if not {"attention", "full_attention"}.issuperset(kinds):
            raise ModelError("Mamba layers of Granite 4 are not supported natively.")
        if config.get("num_local_experts", 8):
            raise ModelError("Granite 4 with experts is not supported natively.")
        if config.get("position_embedding_type") != "rope":
            raise ModelError("Granite 4 without rotary positions is not supported natively.")
        size = positive(config, "shared_intermediate_size")
        return Granite.read(config | {"intermediate_size": size})
