"""Which lane runs a model: decided from facts that need no weights."""

import importlib
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.core.errors import ModelError
from headrace.models.registry import FAMILIES, family
from headrace.models.spec import ModelSpec

LANES = {
    "native-text": "headrace.runner.lanes.native_text:NativeText",
    "generic-text": "headrace.runner.lanes.generic_text:GenericText",
}


def choose_lane(spec: ModelSpec, wanted: str) -> Any:
    """The lane's class; ModelError with the reason if no lane, or not the wanted one, can."""
    objections = {"native-text": _native_objection(spec), "generic-text": _generic_objection(spec)}
    if wanted != "auto":
        if objection := objections[wanted]:
            raise ModelError(f"Lane {wanted} cannot run {spec.name}: {objection}")
        return _load(wanted)
    for lane, objection in objections.items():
        if objection is None:
            return _load(lane)
    reasons = " ".join(f"{lane}: {objection}" for lane, objection in objections.items())
    raise ModelError(f"No lane can run {spec.name}. {reasons}")


def _load(lane: str) -> Any:
    module, name = LANES[lane].split(":")
    return getattr(importlib.import_module(module), name)


def _native_objection(spec: ModelSpec) -> str | None:
    if spec.architecture not in FAMILIES:
        return f"{spec.architecture} is not one of {', '.join(FAMILIES)}."
    try:
        family(spec.architecture).read(spec.config)
    except ModelError as error:
        if error.code != "model_unsupported":
            raise
        return str(error)
    return None


def _generic_objection(spec: ModelSpec) -> str | None:
    if "vision_config" in spec.config or "audio_config" in spec.config:
        return f"{spec.architecture} has more than a text side."
    kind = spec.config.get("model_type", "")
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) == spec.architecture:
        return None
    if "auto_map" in spec.config:
        return f"{spec.architecture} needs code from its repository, which is never run."
    return f"{spec.architecture} is no causal language model that transformers knows."
