"""Chooses the lane that runs a model, from facts that need no weights."""

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
_OF_GGUF = ("native-text", "llama-cpp")
_ENCODER = "headrace_engine.runner.lanes.encoder:GenericEncoder"
"""Lane generic-text for a model that draws nothing."""


def choose_lane(spec: ModelSpec, wanted: str) -> Any:
    """The lane's class; ModelError with the reason if no lane, or not the wanted one, can."""
    if wanted != "auto":
        if objection := _gguf_objection(spec, wanted) or _OBJECTIONS[wanted](spec):
            raise ModelError(f"Lane {wanted} cannot run {spec.name}: {objection}")
        return _load(wanted, spec)
    for lane, is_for in _MATCHERS.items():
        if is_for(spec):  # most others would ask transformers, whose import takes a second
            return _load(lane, spec)
    objections = " ".join(f"{lane}: {_OBJECTIONS[lane](spec)}" for lane in _in_question(spec))
    raise ModelError(f"No lane can run {spec.name}. {objections}")


def _gguf_objection(spec: ModelSpec, lane: str) -> str | None:
    if not spec.is_gguf or lane in _OF_GGUF:
        return None
    return (
        f"GGUF files are run by {' and '.join(_OF_GGUF)}; leave --lane out, or give the folder of "
        "the same model with safetensors files."
    )


def _in_question(spec: ModelSpec) -> tuple[str, ...]:
    """The lanes whose objections to this model are worth a reader's time."""
    if spec.is_gguf:
        return _OF_GGUF
    seeing = ("native-multimodal", "generic-multimodal") if _has_other_sides(spec) else ()
    return ("native-text", "generic-text", *seeing, "generic-seq2seq-source")


def matches(spec: ModelSpec) -> list[str]:
    """The lanes that are for this model: one or none, since matchers exclude each other."""
    return [lane for lane, is_for in _MATCHERS.items() if is_for(spec)]


def _load(lane: str, spec: ModelSpec) -> Any:
    is_encoder = lane == "generic-text" and not _is_causal(spec)
    module, name = (_ENCODER if is_encoder else LANES[lane]).split(":")
    return getattr(importlib.import_module(module), name)


def why_not_native(spec: ModelSpec) -> str | None:
    """The reason why our own code cannot run a model, as a sentence; None if it can."""
    if reason := spec.config.get("only_llama_cpp"):
        return str(reason)
    if spec.architecture.endswith("ForCausalLM") and _has_other_sides(spec):
        return f"{spec.architecture} has more than a text side."
    if not is_native(spec.architecture):
        return f"{spec.architecture} has no implementation of ours."
    try:
        family(spec.architecture).read(spec.config)
    except ModelError as error:
        if error.code != "model_unsupported":
            raise
        return str(error)
    return None


def _seeing_objection(spec: ModelSpec) -> str | None:
    if spec.architecture not in SEEING or "vision_config" not in spec.config:
        return f"{spec.architecture} has no vision side beside an implementation of ours."
    return why_not_native(spec) or _processor_objection(spec)


def _processor_objection(spec: ModelSpec) -> str | None:
    if spec.has_processor:
        return None
    return "the folder has no preprocessor_config.json or processor_config.json."


def _has_other_sides(spec: ModelSpec) -> bool:
    return "vision_config" in spec.config or "audio_config" in spec.config


def _generic_objection(spec: ModelSpec) -> str | None:
    if _has_other_sides(spec):
        return f"{spec.architecture} has more than a text side."
    if is_mxfp4(spec.config):
        return "its weights are MXFP4, which native-text alone computes."
    # Imported where it is needed: it takes longer than a small model to load.
    from headrace_engine.runner.lanes.encoder import task_of

    if _is_causal(spec) or task_of(spec):
        return None
    if "auto_map" in spec.config:
        return f"{spec.architecture} needs code from its repository, which is never run."
    return (
        f"{spec.architecture} is no causal language model that transformers knows, nor an encoder."
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
        return f"{spec.architecture} is no encoder-decoder model that transformers knows."
    if "audio_config" in spec.config or "vision_config" in spec.config:
        return f"{spec.architecture} reads more than text."
    return None


def _image_objection(spec: ModelSpec) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kind = spec.config.get("model_type", "")
    is_known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind) == spec.architecture
    if not is_known or "vision_config" not in spec.config:
        return f"{spec.architecture} is no image-text model that transformers knows."
    return _processor_objection(spec)


def has_llama_cpp() -> bool:
    """Whether the extra is installed; it is not imported."""
    return importlib.util.find_spec("llama_cpp") is not None


def _llama_objection(spec: ModelSpec) -> str | None:
    if not spec.is_gguf:
        return f"{spec.name} has no GGUF file."
    if not has_llama_cpp():
        return (
            "llama-cpp-python is not installed; pip install 'headrace[llama-cpp]' (it is built "
            "from source), or use the model's safetensors files."
        )
    return None


def _is_native(spec: ModelSpec) -> bool:
    return why_not_native(spec) is None


def _is_native_text(spec: ModelSpec) -> bool:
    """Whether this lane is chosen; asked to, it also runs the text side of models that see."""
    return _is_native(spec) and not _sees_natively(spec)


def _sees_natively(spec: ModelSpec) -> bool:
    return _seeing_objection(spec) is None


def _is_generic(spec: ModelSpec) -> bool:
    """Whether this lane is chosen; asked to, it also runs models that we implement."""
    return not _is_native(spec) and _generic_objection(spec) is None


def _is_multimodal(spec: ModelSpec) -> bool:
    return not _is_native(spec) and _image_objection(spec) is None


def _has_source(spec: ModelSpec) -> bool:
    return _source_objection(spec) is None


def _is_for_llama(spec: ModelSpec) -> bool:
    return "only_llama_cpp" in spec.config and _llama_objection(spec) is None


_OBJECTIONS = {
    "native-text": why_not_native,
    "native-multimodal": _seeing_objection,
    "generic-text": _generic_objection,
    "generic-multimodal": _image_objection,
    "generic-seq2seq-source": _source_objection,
    "llama-cpp": _llama_objection,
}
"""Functions that return why a lane cannot run a model, or None."""
_MATCHERS = {
    "native-text": _is_native_text,
    "native-multimodal": _sees_natively,
    "generic-text": _is_generic,
    "generic-multimodal": _is_multimodal,
    "generic-seq2seq-source": _has_source,
    "llama-cpp": _is_for_llama,
}
