"""The files of an adapter (LoRA): PEFT's folders and GGUF files; reads no value, without torch."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoints.gguf_header import read_gguf
from headrace.checkpoints.gguf_names import original_name
from headrace.checkpoints.headers import TensorHeader, read_file, text_side
from headrace.core.adapter import Adapter
from headrace.core.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TYPES = ("F32", "F16", "BF16")
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "use_qalora": (False,),
    "alora_invocation_tokens": ([],),
    "megatron_config": (),
    "arrow_config": (),
}
"""Options that change what is computed, and their values (beside null) with which they do not."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin a training that change the base's weights, too."""


class FactorHeaders(msgspec.Struct, frozen=True):
    """The factors of one module: down [rank, inputs], and up [outputs, rank], to be scaled."""

    down: TensorHeader
    up: TensorHeader
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdapterFiles(msgspec.Struct, frozen=True):
    """An adapter as its files' heads describe it; `factors` by the base checkpoint's modules."""

    path: Path  # of the file with the weights
    factors: dict[str, FactorHeaders]
    is_gguf: bool = False

    @property
    def num_values(self) -> int:
        return sum(it.down.num_values + it.up.num_values for it in self.factors.values())


def read_adapter(path: Path, architecture: str) -> AdapterFiles:
    """The adapter of that path, for a model of that architecture; ModelError if it is not fit."""
    if path.suffix == ".gguf" and os.path.isfile(path):  # also of a path too long to be one
        return _of_gguf(path, architecture)
    if not os.path.isdir(path):
        raise ModelError(
            f"No adapter was found at {path}; give a folder with {CONFIG}, or a GGUF file."
        )
    return _of_peft(path)


def name_adapter(name: str, path: Path, architecture: str, parent: str = "") -> Adapter:
    """The adapter with its fingerprint, which reads all of it; ModelError if it is not fit."""
    path = path.expanduser()
    files = read_adapter(path, architecture)
    return Adapter(name, str(path.absolute()), fingerprint_of(files), parent)


def fingerprint_of(files: AdapterFiles) -> str:
    """16 hex digits over the weights' file and what scales them."""
    scales = sorted((module, it.scale) for module, it in files.factors.items())
    digest = hashlib.sha256(json.dumps(scales).encode())
    try:
        with files.path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"{files.path.name} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()[:16]


def _of_peft(folder: Path) -> AdapterFiles:
    config = _config(folder)
    _refuse_other_kinds(folder, config)
    weights = folder / WEIGHTS
    if not weights.is_file():
        others = "; adapter_model.bin is not read: save it as safetensors" * any(
            folder.glob("*.bin")
        )
        raise ModelError(f"The adapter {folder.name} has no {WEIGHTS}{others}.")
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, header in read_file(weights).items():
        found = _PEFT_NAME.fullmatch(name)
        if found is None:
            raise ModelError(
                f"The adapter {folder.name} has a tensor {name}, which is no factor of a linear "
                "layer; embeddings, biases and whole modules are not taken."
            )
        pairs.setdefault(found[1], {})[found[2]] = header
    _check_targets(folder, config.get("target_modules"), pairs)
    factors = {}
    for module, pair in pairs.items():
        rank, scale = _rank_and_scale(folder, config, module)
        factors[module] = _factors(folder.name, module, pair, scale)
        if factors[module].rank != rank:
            raise ModelError(
                f"The adapter {folder.name} has rank {factors[module].rank} at {module}, and "
                f"{CONFIG} says {rank}; save it again."
            )
    return AdapterFiles(weights, _text_names(folder.name, factors))


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{folder.name} has no {CONFIG}; give the folder that PEFT saved an adapter in."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{CONFIG} of {folder.name} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG} of {folder.name} is no object; save the adapter again.")
    return config


def _refuse_other_kinds(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"The adapter {folder.name} is of kind {kind}; only LORA is computed.")
    for option, harmless in _HARMLESS.items():
        value = config.get(option)
        if value is not None and value not in harmless:
            what = "DoRA" if option == "use_dora" else option
            raise ModelError(
                f"The adapter {folder.name} has {what} ({option}: {value}), which is not computed "
                "here; merge it into its model with PEFT, and serve that."
            )
    begins = str(config.get("init_lora_weights") or "").lower()
    if begins.startswith(_CHANGES_BASE):
        raise ModelError(
            f"The adapter {folder.name} was begun by {begins}, which changes its model's weights; "
            "save it with path_initial_model_for_weight_conversion."
        )


def _check_targets(folder: Path, targets: Any, modules: Mapping[str, Any]) -> None:
    """The modules are those that `target_modules` names: endings, or one regular expression."""
    if targets is None or targets == "all-linear":
        return
    if isinstance(targets, str):
        strange = [it for it in modules if not _matches(targets, it)]
    elif isinstance(targets, list) and all(isinstance(it, str) for it in targets):
        strange = [it for it in modules if not any(_ends_with(it, end) for end in targets)]
        missing = [end for end in targets if not any(_ends_with(it, end) for it in modules)]
        if missing:
            raise ModelError(
                f"The adapter {folder.name} names {missing[0]} in target_modules, and has no "
                "tensors for it; save it again."
            )
    else:
        raise ModelError(f"target_modules in {CONFIG} of {folder.name} is no list of names.")
    if strange:
        raise ModelError(
            f"The adapter {folder.name} has tensors for {strange[0]}, which target_modules does "
            "not name; save it again."
        )


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ModelError(f"{pattern!r} in {CONFIG} is no regular expression: {error}.") from None


def _rank_and_scale(folder: Path, config: dict[str, Any], module: str) -> tuple[int, float]:
    rank = _for(config.get("rank_pattern"), module, config.get("r"))
    alpha = _for(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
        raise ModelError(
            f"{CONFIG} of {folder.name} has r {rank} and lora_alpha {alpha} for {module}; both "
            "must be numbers, and r at least 1."
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _for(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that the module's name ends with."""
    for pattern, value in (patterns or {}).items():
        if _matches(rf"(.*\.)?({pattern})", module):
            return value
    return default


def _factors(
    adapter: str, module: str, pair: Mapping[str, TensorHeader], scale: float
) -> FactorHeaders:
    """The pair, if it is one; whether it fits the base is another question."""
    down, up = pair.get("A"), pair.get("B")
    if down is None or up is None:
        lost = "A" if down is None else "B"
        raise ModelError(f"The adapter {adapter} lacks factor {lost} of {module}; save it again.")
    is_pair = len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1] > 0
    if not is_pair:
        raise ModelError(
            f"The adapter {adapter} has factors of shapes {list(down.shape)} and {list(up.shape)} "
            f"at {module}; [rank, inputs] and [outputs, rank] are computed."
        )
    return FactorHeaders(down, up, scale)


def _text_names(adapter: str, factors: dict[str, FactorHeaders]) -> dict[str, FactorHeaders]:
    """By the names that modules have in a model of text alone."""
    headers = {f"{module}.weight": it.down for module, it in factors.items()}
    for name, header in headers.items():
        if header.dtype not in _TYPES:
            raise ModelError(
                f"The adapter {adapter} has {header.dtype} at {name}; {', '.join(_TYPES)} are "
                "computed."
            )
    kept = text_side(headers)
    if len(kept) < len(factors):
        raise ModelError(f"The adapter {adapter} changes more than a text side; that is not run.")
    return dict(zip((n.removesuffix(".weight") for n in kept), factors.values(), strict=True))


def _of_gguf(path: Path, architecture: str) -> AdapterFiles:
    head = read_gguf(path)
    kind = head.fields.get("general.type"), head.fields.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise ModelError(f"{path.name} is no adapter: it says {kind[0]}, and {kind[1]}.")
    alpha = head.fields.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float):
        raise ModelError(f"{path.name} has no adapter.lora.alpha; convert it again.")
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in head.tensors.items():
        base, _, factor = name.rpartition(".lora_")
        if factor not in ("a", "b"):
            raise ModelError(f"{path.name} has a tensor {name}, which is no factor of a layer.")
        module = original_name(base, architecture).removesuffix(".weight")
        if ".linear_attn." in module:
            raise ModelError(
                f"{path.name} changes {module}, whose order in GGUF files is not brought back for "
                "adapters; give the folder that PEFT saved."
            )
        # B's rows are in the file's order, and brought back by the name of the base's own
        stored = f"{module}.weight" if factor == "b" else f"{module}.down"
        end = tensor.offset + tensor.num_bytes
        header = TensorHeader(tensor.kind, tensor.shape, (tensor.offset, end), path.name, stored)
        pairs.setdefault(module, {})[factor.upper()] = header
    factors = {}
    for module, pair in pairs.items():
        found = _factors(path.name, module, pair, 1.0)
        factors[module] = msgspec.structs.replace(found, scale=float(alpha) / found.rank)
    return AdapterFiles(path, factors, is_gguf=True)
