"""How a checkpoint's makers turn text into one vector: the files that sentence-transformers writes.

`modules.json` lists the stages, `1_Pooling/config.json` says how rows become one, and
`config_sentence_transformers.json` holds the prompts that go before a text. All of them may be
absent.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_COMPUTED = ("Transformer", "Pooling", "Normalize")
_MAX_FILE = 1 << 20


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Settings(msgspec.Struct):
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None


class SentenceSpec(msgspec.Struct, frozen=True):
    """Facts of the files; `objection`: why the vectors that they describe cannot be computed."""

    pooling: str = ""  # mean, last or cls; "": the files do not say
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    covers_prompt: bool = True  # the prompt's own rows are pooled, too
    dimensions: tuple[int, ...] | None = ()  # to which vectors may be cut; None: any
    objection: str = ""
    score_is_logit: bool = True  # a cross-encoder's score is to be put between 0 and 1


def read_sentences(spec: ModelSpec) -> SentenceSpec:
    """ModelError `model_corrupt` if a file is there and cannot be read."""
    settings = _read(spec, "config_sentence_transformers.json", _Settings) or _Settings()
    prompts = settings.prompts or {}
    default = settings.default_prompt_name
    if default is not None and default not in prompts:
        raise _damaged(spec, "config_sentence_transformers.json")
    found = SentenceSpec(
        prompts=prompts,
        default_prompt=default,
        dimensions=_dimensions(spec.config),
        score_is_logit=not _is_identity(spec.config),
    )
    modules = _read(spec, "modules.json", list[_Module])
    if modules is None:
        return found
    kinds = [module.type.rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _COMPUTED:
            objection = f"its modules.json has a stage {kind}; {', '.join(_COMPUTED)} are supported"
            return msgspec.structs.replace(found, objection=objection)
    if "Pooling" not in kinds:
        return found
    path = modules[kinds.index("Pooling")].path
    if Path(path).name != path:
        raise _damaged(spec, "modules.json")
    return _pooled(spec, f"{path}/config.json", found)


def _pooled(spec: ModelSpec, name: str, found: SentenceSpec) -> SentenceSpec:
    config = _read(spec, name, dict[str, Any])
    if config is None:
        raise ModelError(
            f"{spec.name} has no {name}, which its modules.json asks for; download it again.",
            "model_corrupt",
        )
    on = [key for key, value in config.items() if _is_on(key, value)]
    modes = [key.removeprefix("pooling_mode_") for key in on]
    if isinstance(named := config.get("pooling_mode"), str):  # as newer versions write it
        modes = [named]
    by_name = {key.removeprefix("pooling_mode_"): kind for key, kind in _POOLINGS.items()}
    by_name |= {kind: kind for kind in _POOLINGS.values()}
    if len(modes) != 1 or modes[0] not in by_name:
        asked = " and ".join(modes) or "no mode"
        objection = f"its {name} asks for {asked}; mean, last and cls are supported, one of them"
        return msgspec.structs.replace(found, objection=objection)
    covers = config.get("include_prompt", True) is not False
    return msgspec.structs.replace(found, pooling=by_name[modes[0]], covers_prompt=covers)


def _is_on(key: str, value: Any) -> bool:
    return key.startswith("pooling_mode_") and value is True


def _dimensions(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Models trained so that the first numbers of a vector are a vector by themselves say so."""
    Sizes = tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    try:
        sizes = msgspec.convert(config.get("matryoshka_dimensions") or (), Sizes)
    except msgspec.ValidationError:
        sizes = ()
    return None if not sizes and config.get("is_matryoshka") is True else sizes


def _is_identity(config: dict[str, Any]) -> bool:
    """Whether a cross-encoder's makers take its scores as they are; a sigmoid is usual."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or ""
    return str(named).rpartition(".")[2] == "Identity"


def _read(spec: ModelSpec, name: str, kind: Any) -> Any:
    path = spec.folder / name
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ValueError
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (ValueError, RecursionError) as error:
        raise _damaged(spec, name) from error


def _damaged(spec: ModelSpec, name: str) -> ModelError:
    return ModelError(
        f"{name} of {spec.name} is damaged; download it again, or delete it.", "model_corrupt"
    )
