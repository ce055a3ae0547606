"""Chooses the lane, the way of running a kind of model, without reading the model's weights."""

import importlib
import importlib.util
from typing import Any

from headrace_common.checkpoints.spec import SEEING, ModelSpec, is_mxfp4
from headrace_common.errors import ModelError
from headrace_engine.models.registry import family, is_native

LANES = {
    "native-text": "headrace_engine.runner.lanes.native_text:NativeText",
    "native-multimodal": "headrace_engine.runner.lanes.native_multimodal:NativeMultimodal",
    "generic-text": "headrace_engine.runner.lanes.generic_text:GenericText",
    "generic-multimodal": "headrace_engine.runner.lanes.multimodal:GenericMultimodal",
    "generic-seq2seq-source": "headrace_engine.runner.lanes.seq2seq:Seq2SeqSource",
    "llama-cpp": "headrace_engine.runner.lanes.llama_cpp:LlamaCpp",
}
_ENCODER = "headrace_engine.runner.lanes.encoder:GenericEncoder"
"""The implementation of lane generic-text for encoders, which generate no tokens."""


def choose_lane(spec: ModelSpec, wanted: str) -> Any:
    """Return the class of the lane that runs the model.

    Raises ModelError with the reasons if the wanted lane cannot run the model, or if no lane can.
    """
    if wanted != "auto":
        if objection := _gguf_objection(spec, wanted) or _OBJECTIONS[wanted](spec):
            raise ModelError(f"Lane {wanted} cannot run {spec.name}: {objection}")
        return _load(wanted, spec)
    for lane, is_for in _MATCHERS.items():
        # Stop at the first match: most other matchers import transformers, which takes about a
        # second.
        if is_for(spec):
            return _load(lane, spec)
    objections = " ".join(f"{lane}: {_OBJECTIONS[lane](spec)}" for lane in _lanes_to_report(spec))
    raise ModelError(f"No lane can run {spec.name}. {objections}")


def _gguf_objection(spec: ModelSpec, lane: str) -> str | None:
    if not spec.is_gguf or lane in (lanes := _gguf_lanes(spec)):
        return None
    *first, last = lanes
    return (
        f"only {', '.join(first)} and {last} run GGUF files. Omit --lane, or give a folder with "
        "the model's safetensors files."
    )


def _gguf_lanes(spec: ModelSpec) -> tuple[str, ...]:
    """Return the lanes that can run a GGUF file of this architecture."""
    if not _has_other_modalities(spec):
        return ("native-text", "llama-cpp")
    if spec.architecture in SEEING:
        return ("native-text", "native-multimodal", "llama-cpp")
    return ("generic-multimodal", "llama-cpp")


def _lanes_to_report(spec: ModelSpec) -> tuple[str, ...]:
    """Return the lanes whose objections an error message should list."""
    if spec.is_gguf:
        return _gguf_lanes(spec)
    multimodal = ("native-multimodal", "generic-multimodal") if _has_other_modalities(spec) else ()
    return ("native-text", "generic-text", *multimodal, "generic-seq2seq-source")


def matches(spec: ModelSpec) -> list[str]:
    """Return the lanes that match this model, at most one."""
    return [lane for lane, is_for in _MATCHERS.items() if is_for(spec)]


def _load(lane: str, spec: ModelSpec) -> Any:
    is_encoder = lane == "generic-text" and not _is_causal(spec)
    module, name = (_ENCODER if is_encoder else LANES[lane]).split(":")
    return getattr(importlib.import_module(module), name)


def why_not_native(spec: ModelSpec) -> str | None:
    """Return a sentence that says why the model has no native implementation, or None."""
    if reason := spec.config.get("only_llama_cpp"):
        return str(reason)
    if spec.architecture.endswith("ForCausalLM") and _has_other_modalities(spec):
        return f"{spec.architecture} processes more than text."
    if not is_native(spec.architecture):
        return f"{spec.architecture} has no native implementation."
    try:
        family(spec.architecture).read(spec.config)
    except ModelError as error:
        if error.code != "model_unsupported":
            raise
        return str(error)
    return None


def _native_multimodal_objection(spec: ModelSpec) -> str | None:
    if spec.architecture not in SEEING or "vision_config" not in spec.config:
        return f"{spec.architecture} has no native implementation that processes images."
    return why_not_native(spec) or _processor_objection(spec)


def _processor_objection(spec: ModelSpec) -> str | None:
    if spec.has_processor:
        return None
    return "the folder has no preprocessor_config.json or processor_config.json."


def _has_other_modalities(spec: ModelSpec) -> bool:
    return "vision_config" in spec.config or "audio_config" in spec.config


def _generic_objection(spec: ModelSpec) -> str | None:
    if _has_other_modalities(spec):
        return f"{spec.architecture} processes more than text."
    if is_mxfp4(spec.config):
        return "its weights are MXFP4, which only native-text supports."
    # The import is here because it takes longer than loading a small model.
    from headrace_engine.runner.lanes.encoder import task_of

    if _is_causal(spec) or task_of(spec):
        return None
    if "auto_map" in spec.config:
        return f"{spec.architecture} needs code from its repository, which Headrace never runs."
    return (
        f"{spec.architecture} is neither a causal language model nor an encoder that transformers "
        "knows."
    )


def _is_causal(spec: ModelSpec) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = spec.config.get("model_type", "")
    return bool(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) == spec.architecture)


def _source_objection(spec: ModelSpec) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    kind = spec.config.get("model_type", "")
    is_known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(kind) == spec.architecture
    if not (is_known and spec.has_source):
        return f"{spec.architecture} is not an encoder-decoder model that transformers knows."
    if "audio_config" in spec.config or "vision_config" in spec.config:
        return f"{spec.architecture} processes more than text."
    # Switch Transformers and NLLB-MoE: an answer would depend on how tokens are batched into steps.
    if "expert_capacity" in spec.config:
        return (
            f"{spec.architecture} limits how many tokens each expert processes in a forward pass, "
            "which Headrace does not support; use a model without experts, such as FLAN-T5."
        )
    return None


def _image_objection(spec: ModelSpec) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kind = spec.config.get("model_type", "")
    is_known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind) == spec.architecture
    if not is_known or "vision_config" not in spec.config:
        return f"{spec.architecture} is not an image-text model that transformers knows."
    return _processor_objection(spec)


def has_llama_cpp() -> bool:
    """Return whether the extra `llama-cpp` is installed, without an import."""
    return importlib.util.find_spec("llama_cpp") is not None


def _llama_objection(spec: ModelSpec) -> str | None:
    if not spec.is_gguf:
        return f"{spec.name} has no GGUF file."
    if not has_llama_cpp():
        return (
            "llama-cpp-python is not installed. Run pip install '.[llama-cpp]' in the checkout to "
            "build it from source, or use the model's safetensors files."
        )
    return None


def _is_native(spec: ModelSpec) -> bool:
    return why_not_native(spec) is None


def _is_native_text(spec: ModelSpec) -> bool:
    """Return whether "auto" chooses native-text, which can also run the text of vision models."""
    return _is_native(spec) and not _is_native_multimodal(spec)


def _is_native_multimodal(spec: ModelSpec) -> bool:
    return _native_multimodal_objection(spec) is None


def _is_generic(spec: ModelSpec) -> bool:
    """Return whether "auto" chooses generic-text, which can also run models with a native lane."""
    return not _is_native(spec) and _generic_objection(spec) is None


def _is_multimodal(spec: ModelSpec) -> bool:
    return not _is_native(spec) and _image_objection(spec) is None


def _has_source(spec: ModelSpec) -> bool:
    return _source_objection(spec) is None


def _is_for_llama(spec: ModelSpec) -> bool:
    return "only_llama_cpp" in spec.config and _llama_objection(spec) is None


_OBJECTIONS = {
    "native-text": why_not_native,
    "native-multimodal": _native_multimodal_objection,
    "generic-text": _generic_objection,
    "generic-multimodal": _image_objection,
    "generic-seq2seq-source": _source_objection,
    "llama-cpp": _llama_objection,
}
"""For each lane, a function that returns why the lane cannot run a model, or None."""
_MATCHERS = {
    "native-text": _is_native_text,
    "native-multimodal": _is_native_multimodal,
    "generic-text": _is_generic,
    "generic-multimodal": _is_multimodal,
    "generic-seq2seq-source": _has_source,
    "llama-cpp": _is_for_llama,
}
