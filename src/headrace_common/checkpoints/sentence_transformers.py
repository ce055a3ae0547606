"""Reads the files of sentence-transformers, which describe how a model turns text into a vector.

`modules.json` lists the stages. `1_Pooling/config.json` has the pooling. The maximum length of a
text is in `sentence_bert_config.json`. `config_sentence_transformers.json` has the prompts that
precede a text. All of these files are optional.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.sampling import PoolingMode

_POOLINGS: dict[str, PoolingMode] = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "last",
}
"""The pooling modes by their names in older files.

If an older file turns on several modes, their vectors are joined in this order.
"""
_NEWER = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"} | {
    "weightedmean": "weightedmean_tokens"
}
_INPUT_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_FIRST = "Transformer"
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
_MAX_FILE = 1 << 20


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class _Settings(msgspec.Struct):
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None


class _InputJson(msgspec.Struct):
    max_seq_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    do_lower_case: bool = False


class _TokenizerJson(msgspec.Struct):
    model_max_length: Any = None  # tokens; often 1e30


class _DenseJson(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False


class VectorStage(msgspec.Struct, frozen=True):
    """A stage after pooling: normalization, or a linear layer with an activation."""

    kind: str  # Normalize or Dense
    path: str = ""  # folder with the weights of a Dense layer
    size: tuple[int, int] = (0, 0)  # inputs and outputs of a Dense layer
    has_bias: bool = False
    activation: str = "Identity"  # name of a class in torch.nn


class SentenceSpec(msgspec.Struct, frozen=True):
    """The settings from the files. If the files are not supported, `objection` says why."""

    # The vectors of several modes are joined. Empty: the files state no mode.
    pooling: tuple[PoolingMode, ...] = ()
    stages: tuple[VectorStage, ...] = (VectorStage("Normalize"),)
    root: Path = Path()  # folder with modules.json and the stages' folders
    max_tokens: int | None = None  # maximum length of a text; longer texts are cut
    lowers_case: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    covers_prompt: bool = True  # whether pooling includes the prompt
    # The lengths to which a vector may be cut. None: any length.
    dimensions: tuple[int, ...] | None = ()
    objection: str = ""
    # Whether a cross-encoder's score needs a sigmoid.
    score_is_logit: bool = True

    @property
    def are_units(self) -> bool:
        """Whether vectors have length 1."""
        return bool(self.stages) and self.stages[-1].kind == "Normalize"


def transformer_folder(root: Path) -> Path | None:
    """Return the subfolder with config.json and weights, or None if no such subfolder exists.

    Older versions of sentence-transformers store config.json and weights in this subfolder.
    """
    try:
        modules = msgspec.json.decode(read_small(root / "modules.json"), type=list[_Module])
    except (OSError, ValueError, RecursionError):
        return None
    paths = [module.path for module in modules if module.kind == _FIRST]
    folder = root / Path(paths[0]).name if paths and paths[0] else root
    return folder if folder != root and os.path.isfile(folder / "config.json") else None


def read_sentences(spec: ModelSpec) -> SentenceSpec:
    """Read the files. Raises ModelError `model_corrupt` if a file exists but cannot be read."""
    above = spec.folder.parent
    return _Files(spec, above if transformer_folder(above) == spec.folder else spec.folder).read()


class _Unsupported(Exception):
    """The files describe something unsupported; the message says what."""


class _Files:
    """The files of one checkpoint."""

    def __init__(self, spec: ModelSpec, root: Path) -> None:
        self._spec = spec
        self._root = root

    def read(self) -> SentenceSpec:
        file = "config_sentence_transformers.json"
        settings = self._read(file, _Settings) or _Settings()
        prompts = settings.prompts or {}
        default = settings.default_prompt_name
        if default is not None and default not in prompts:
            raise self._damaged(file)
        found = SentenceSpec(
            root=self._root,
            prompts=prompts,
            default_prompt=default,
            dimensions=_dimensions(self._spec.config),
            score_is_logit=not _is_identity(self._spec.config),
        )
        modules = self._read("modules.json", list[_Module])
        if modules is None:
            return found
        found = self._with_input(found)
        try:
            return self._with_stages(found, modules)
        except _Unsupported as refused:
            return msgspec.structs.replace(found, objection=str(refused))

    def _with_input(self, found: SentenceSpec) -> SentenceSpec:
        """Add the maximum length of a text, and whether text is lowercased.

        The first existing file of _INPUT_FILES decides. If this file states no length, the
        tokenizer's config and the model's config limit the length.
        """
        folder = self._spec.folder
        files = (self._read(name, _InputJson, folder) for name in _INPUT_FILES)
        said = next((one for one in files if one is not None), _InputJson())
        limit = said.max_seq_length
        if limit is None:
            tokenizer = self._read("tokenizer_config.json", _TokenizerJson, folder)
            stated = tokenizer.model_max_length if tokenizer is not None else None
            limits = [n for n in (stated, self._spec.max_positions) if isinstance(n, int) and n > 0]
            limit = min(limits, default=None)
        return msgspec.structs.replace(found, max_tokens=limit, lowers_case=said.do_lower_case)

    def _with_stages(self, found: SentenceSpec, modules: list[_Module]) -> SentenceSpec:
        pooling: tuple[PoolingMode, ...] = ()
        stages, covers = list[VectorStage](), True
        for place, module in enumerate(modules):
            if module.path and Path(module.path).name != module.path:
                raise self._damaged("modules.json")
            match module.kind:
                case "Transformer" if place == 0:
                    pass
                case "Pooling" if place == 1:
                    pooling, covers = self._pooling(f"{module.path}/config.json")
                case "Normalize":
                    stages.append(VectorStage("Normalize"))
                case "Dense" if pooling:
                    stages.append(self._dense(module.path))
                case kind:
                    raise _Unsupported(
                        f"stage {place} of its modules.json is {kind}; supported stages, in this "
                        "order: Transformer, Pooling, Dense, Normalize"
                    )
        return msgspec.structs.replace(
            found, pooling=pooling, stages=tuple(stages), covers_prompt=covers
        )

    def _pooling(self, name: str) -> tuple[tuple[PoolingMode, ...], bool]:
        """Return the pooling modes, and whether pooling includes the prompt."""
        config = self._needed(name, dict[str, Any])
        modes = [mode for mode in _POOLINGS if config.get(f"pooling_mode_{mode}") is True]
        # Newer versions use this key.
        named = config.get("pooling_mode")
        if named is not None:
            several = named if isinstance(named, list) else [named]
            modes = [_NEWER.get(mode, mode) for mode in several if isinstance(mode, str)]
        unknown = [mode for mode in modes if mode not in _POOLINGS]
        if unknown:
            words = " and ".join(unknown)
            raise _Unsupported(
                f"its {name} has the pooling mode {words}; supported modes: {', '.join(_POOLINGS)}"
            )
        # If all modes are off, sentence-transformers uses the mean.
        pooling = tuple(_POOLINGS[mode] for mode in modes or ("mean_tokens",))
        return pooling, config.get("include_prompt") is not False

    def _dense(self, path: str) -> VectorStage:
        name = f"{path}/config.json"
        layer: _DenseJson = self._needed(name, _DenseJson)
        where, _, activation = layer.activation_function.rpartition(".")
        if activation not in _ACTIVATIONS or not where.startswith("torch."):
            there = ", ".join(_ACTIVATIONS)
            asked = layer.activation_function
            raise _Unsupported(
                f"its {name} has the activation {asked}; supported activations of torch: {there}"
            )
        output = layer.module_output_name or layer.module_input_name
        if layer.use_residual or {layer.module_input_name, output} != {"sentence_embedding"}:
            raise _Unsupported(
                f"its {name} has a residual connection, or is not applied to the pooled vector"
            )
        size = layer.in_features, layer.out_features
        return VectorStage("Dense", path, size, layer.bias, activation)

    def _needed(self, name: str, kind: Any) -> Any:
        if (found := self._read(name, kind)) is None:
            raise ModelError(
                f"{self._spec.name} has no {name}, which its modules.json asks for; download it "
                "again.",
                "model_corrupt",
            )
        return found

    def _read(self, name: str, kind: Any, folder: Path | None = None) -> Any:
        path = (folder or self._root) / name
        # Unlike Path.is_file, os.path.isfile treats a name that no disk can store as a missing
        # file.
        if not os.path.isfile(path):
            return None
        try:
            return msgspec.json.decode(read_small(path, _MAX_FILE), type=kind)
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> ModelError:
        return ModelError(
            f"{name} of {self._spec.name} is damaged; download it again, or delete it.",
            "model_corrupt",
        )


def _dimensions(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths to which vectors may be cut (for Matryoshka models).

    None means any length.
    """
    Sizes = tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    try:
        sizes = msgspec.convert(config.get("matryoshka_dimensions") or (), Sizes)
    except msgspec.ValidationError:
        sizes = ()
    return None if not sizes and config.get("is_matryoshka") is True else sizes


def _is_identity(config: dict[str, Any]) -> bool:
    """Whether a cross-encoder's scores are used unchanged, without the usual sigmoid."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or ""
    return str(named).rpartition(".")[2] == "Identity"
