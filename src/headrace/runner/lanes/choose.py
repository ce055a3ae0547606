"""Which lane runs a model: decided from facts that need no weights."""

import importlib
from typing import Any

from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError
from headrace.models.registry import FAMILIES, family

LANES = {
    "native-text": "headrace.runner.lanes.native_text:NativeText",
    "generic-text": "headrace.runner.lanes.generic_text:GenericText",
}


def choose_lane(spec: ModelSpec, wanted: str) -> Any:
    """The lane's class; ModelError with the reason if no lane, or not the wanted one, can."""
    judges = {"native-text": _native_objection, "generic-text": _generic_objection}
    if wanted != "auto":
        if objection := judges[wanted](spec):
            raise ModelError(f"Lane {wanted} cannot run {spec.name}: {objection}")
        return _load(wanted)
    objections = []
    for lane, judge in judges.items():
        if (objection := judge(spec)) is None:
            return _load(lane)
        objections.append(f"{lane}: {objection}")
    raise ModelError(f"No lane can run {spec.name}. {' '.join(objections)}")


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
    # Imported where it is needed: it takes longer than a small model to load.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) == spec.architecture:
        return None
    if "auto_map" in spec.config:
        return f"{spec.architecture} needs code from its repository, which is never run."
    return f"{spec.architecture} is no causal language model that transformers knows."
