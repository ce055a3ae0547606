"""Which lane runs a model: decided from facts that need no weights."""

import importlib
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.core.errors import ModelError
from headrace.models.registry import FAMILIES, is_native
from headrace.models.spec import ModelSpec

LANES = {
    "native-text": "headrace.runner.lanes.native_text:NativeText",
    "generic-text": "headrace.runner.lanes.generic_text:GenericText",
}


def choose_lane(spec: ModelSpec, wanted: str) -> Any:
    """The lane's class; ModelError with the reason if no lane, or not the wanted one, can."""
    fits = _fitting(spec)
    if wanted != "auto" and wanted not in fits:
        raise ModelError(f"Lane {wanted} cannot run {spec.name}: {_reason(spec, wanted)}")
    if not fits:
        raise ModelError(
            f"{spec.name} has the architecture {spec.architecture}, which no lane runs; "
            "causal language models of transformers and these are: " + ", ".join(FAMILIES) + "."
        )
    module, name = LANES[fits[0] if wanted == "auto" else wanted].split(":")
    return getattr(importlib.import_module(module), name)


def _fitting(spec: ModelSpec) -> list[str]:
    """Lanes that can run the model, the one that is chosen first."""
    in_transformers = spec.architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    native = ["native-text"] if is_native(spec.architecture) else []
    return native + (["generic-text"] if in_transformers else [])


def _reason(spec: ModelSpec, wanted: str) -> str:
    if wanted == "native-text":
        return f"{spec.architecture} is not one of {', '.join(FAMILIES)}."
    return f"{spec.architecture} is no causal language model of transformers."
