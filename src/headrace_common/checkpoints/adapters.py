"""The files of an adapter (LoRA): PEFT's folders and GGUF files; reads no value, without torch."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace_common.adapter import Adapter
from headrace_common.checkpoints.gguf_header import TYPES, read_gguf
from headrace_common.checkpoints.gguf_names import original_name
from headrace_common.checkpoints.headers import TensorHeader, read_file, text_side
from headrace_common.checkpoints.patterns import first_matches
from headrace_common.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG = 1 << 20  # bytes
_MAX_HEADER = 4 << 20  # bytes, which describe about 20,000 tensors
_MAX_WEIGHTS = 16 << 30  # bytes, all of which are read for the fingerprint
_LONGEST_NAME = 512  # characters, of a tensor
_SHOWN, _SHOWN_DIGITS = 120, 20  # characters of a text or of a number in a message
_TYPES = ("F32", "F16", "BF16")
_GGUF_TYPES = tuple(name for name, *_ in TYPES.values())
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
    """The adapter of that path, for a model of that architecture; ModelError if it is not fit.

    Takes bounded time and memory, whatever the files hold.
    """
    try:
        place = path.expanduser()
        is_gguf = path.suffix == ".gguf" and os.path.isfile(place)  # False if it is too long
        is_folder = os.path.isdir(place)
    except (RuntimeError, ValueError):  # "~" of an unknown user
        is_gguf = is_folder = False
    if not (is_gguf or is_folder):
        raise ModelError(
            f"No adapter was found at {path}; give a folder with {CONFIG}, or a GGUF file."
        )
    try:
        return _of_gguf(place, architecture) if is_gguf else _of_peft(place)
    except OSError as error:
        raise ModelError(f"The adapter at {path} cannot be read: {error.strerror}.") from None


def name_adapter(name: str, path: Path, architecture: str, parent: str = "") -> Adapter:
    """The adapter with its fingerprint, which reads all of it; ModelError if it is not fit."""
    files = read_adapter(path, architecture)
    return Adapter(name, str(path.expanduser().absolute()), fingerprint_of(files), parent)


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
        is_pickle = (folder / "adapter_model.bin").exists()
        others = "; adapter_model.bin is not supported: save it as safetensors" * is_pickle
        raise ModelError(f"The adapter {folder.name} has no {WEIGHTS}{others}.")
    _check_size(weights)
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, header in read_file(weights, _MAX_HEADER).items():
        found = _PEFT_NAME.fullmatch(name)
        if found is None or len(name) > _LONGEST_NAME:
            raise ModelError(
                f"The adapter {folder.name} has a tensor {_shown(name)}, which is not a factor of "
                "a linear layer; embeddings, biases and whole modules are not supported."
            )
        pairs.setdefault(found[1], {})[found[2]] = header
    _check_targets(folder, config.get("target_modules"), pairs)
    ranks = _by_module(folder, config, pairs, "r", "rank_pattern")
    alphas = _by_module(folder, config, pairs, "lora_alpha", "alpha_pattern")
    factors = {}
    for module, pair in pairs.items():
        own = _factors(folder.name, module, pair, 1.0)
        if ranks[module] != own.rank:
            raise ModelError(
                f"The adapter {folder.name} has rank {own.rank} at {_shown(module)}, but {CONFIG} "
                f"says {ranks[module]:g}; save it again."
            )
        divisor = math.sqrt(own.rank) if config.get("use_rslora") else own.rank
        factors[module] = msgspec.structs.replace(own, scale=alphas[module] / divisor)
    return AdapterFiles(weights, _text_names(folder.name, factors))


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():  # nor a pipe, which would never end
        raise ModelError(
            f"{folder.name} has no {CONFIG}; give the folder that PEFT saved an adapter in."
        )
    with file.open("rb") as opened:
        raw = opened.read(_MAX_CONFIG + 1)
    if len(raw) > _MAX_CONFIG:
        raise ModelError(
            f"{CONFIG} of {folder.name} has more than {_MAX_CONFIG:,} bytes, the limit for a "
            "configuration; save the adapter again."
        )
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(f"{CONFIG} of {folder.name} is not valid JSON; save it again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG} of {folder.name} is not an object; save the adapter again.")
    return config


def _check_size(weights: Path) -> None:
    if (size := weights.stat().st_size) > _MAX_WEIGHTS:
        raise ModelError(
            f"{weights.name} has {size:,} bytes; the limit is {_MAX_WEIGHTS:,}. Merge the adapter "
            "into its model with PEFT, and serve the merged model."
        )


def _shown(value: Any) -> str:
    """A file's value as messages show it: short, on one line."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    shown = str(value)
    if isinstance(value, int) and len(shown) > _SHOWN_DIGITS:
        return f"{shown[:_SHOWN_DIGITS]}…"
    return "".join(it if it.isprintable() else "?" for it in shown[:_SHOWN])


def _refuse_other_kinds(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"The adapter {folder.name} is of type {_shown(kind)}; only LORA is supported."
        )
    for option, harmless in _HARMLESS.items():
        value = config.get(option)
        if value is not None and value not in harmless:
            what = "DoRA" if option == "use_dora" else option
            raise ModelError(
                f"The adapter {folder.name} has {what} ({option}: {_shown(value)}), which is not "
                "supported; merge it into its model with PEFT, and serve the merged model."
            )
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ModelError(f"use_rslora in {CONFIG} of {folder.name} is neither true nor false.")
    begins = _shown(config.get("init_lora_weights")).lower()
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
        found = first_matches([targets], list(modules), CONFIG)
        strange = [it for it, number in zip(modules, found, strict=True) if number < 0]
    elif isinstance(targets, list) and all(isinstance(it, str) for it in targets):
        endings = set(targets)
        named = {it: endings.intersection(_endings(it)) for it in modules}
        strange = [it for it, ends in named.items() if not ends]
        if missing := endings.difference(*named.values()):
            raise ModelError(
                f"The adapter {folder.name} names {_shown(min(missing))} in target_modules, but "
                "has no tensors for it; save it again."
            )
    else:
        raise ModelError(
            f"target_modules in {CONFIG} of {folder.name} is neither a list of names nor a regular "
            "expression."
        )
    if strange:
        raise ModelError(
            f"The adapter {folder.name} has tensors for {_shown(strange[0])}, which target_modules "
            "does not name; save it again."
        )


def _endings(module: str) -> Iterable[str]:
    """The names by which a list of targets may mean this module: "a.b.c", "b.c" and "c"."""
    while module:
        yield module
        module = module.partition(".")[2]


def _by_module(
    folder: Path,
    config: dict[str, Any],
    modules: Iterable[str],
    option: str,
    option_by_pattern: str,
) -> dict[str, float]:
    """The number that an option has for each module: that of the first pattern for its name."""
    modules = list(modules)
    patterns = config.get(option_by_pattern) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{option_by_pattern} in {CONFIG} of {folder.name} is not an object.")
    expressions = [rf"(.*\.)?({pattern})" for pattern in patterns]  # as PEFT reads them
    found = first_matches(expressions, modules, CONFIG) if patterns else [-1] * len(modules)
    values = [*patterns.values(), config.get(option)]  # -1 is the last one: the option's own
    numbers = [_finite(value) for value in values]
    for module, number in zip(modules, found, strict=True):
        if numbers[number] is None:
            raise ModelError(
                f"{CONFIG} of {folder.name} has {option} {_shown(values[number])} for "
                f"{_shown(module)}; it must be a number."
            )
    return {it: numbers[number] or 0.0 for it, number in zip(modules, found, strict=True)}


def _finite(value: Any) -> float | None:
    """The value, if it is a number that can be computed with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _factors(
    adapter: str, module: str, pair: Mapping[str, TensorHeader], scale: float
) -> FactorHeaders:
    """The pair, if it is one; whether it fits the base is another question."""
    down, up = pair.get("A"), pair.get("B")
    if down is None or up is None:
        lost = "A" if down is None else "B"
        raise ModelError(
            f"The adapter {adapter} lacks factor {lost} of {_shown(module)}; save it again."
        )
    is_pair = len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1] > 0
    if not is_pair:
        raise ModelError(
            f"The adapter {adapter} has factors of shapes {list(down.shape)} and {list(up.shape)} "
            f"at {_shown(module)}; they must be [rank, inputs] and [outputs, rank]."
        )
    return FactorHeaders(down, up, scale)


def _text_names(adapter: str, factors: dict[str, FactorHeaders]) -> dict[str, FactorHeaders]:
    """By the names that modules have in a model of text alone."""
    headers = {f"{module}.weight": it.down for module, it in factors.items()}
    for name, header in headers.items():
        if header.dtype not in _TYPES:
            raise ModelError(
                f"The adapter {adapter} has {_shown(header.dtype)} at {_shown(name)}; "
                f"{', '.join(_TYPES)} are supported."
            )
    kept = text_side(headers)
    if len(kept) < len(factors):
        raise ModelError(f"The adapter {adapter} changes more than a text side; that is not run.")
    return dict(zip((n.removesuffix(".weight") for n in kept), factors.values(), strict=True))


def _of_gguf(path: Path, architecture: str) -> AdapterFiles:
    _check_size(path)
    head = read_gguf(path, _MAX_HEADER)
    kind = head.fields.get("general.type"), head.fields.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise ModelError(
            f"{path.name} is not a LoRA adapter: its general.type is {_shown(kind[0])}, and its "
            f"adapter.type is {_shown(kind[1])}."
        )
    alpha = _finite(head.fields.get("adapter.lora.alpha"))
    if alpha is None:
        raise ModelError(f"{path.name} has no adapter.lora.alpha; convert it again.")
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in head.tensors.items():
        base, _, factor = name.rpartition(".lora_")
        if tensor.kind not in _GGUF_TYPES:
            raise ModelError(f"{path.name} has {tensor.kind} at {_shown(name)}; use F16 or F32.")
        if factor not in ("a", "b") or len(name) > _LONGEST_NAME:
            raise ModelError(
                f"{path.name} has a tensor {_shown(name)}, which is not a factor of a layer."
            )
        module = original_name(base, architecture).removesuffix(".weight")
        if ".linear_attn." in module:
            raise ModelError(
                f"{path.name} changes {_shown(module)}, which GGUF files store in another order; "
                "that order is not supported for adapters. Give the folder that PEFT saved."
            )
        # B's rows are in the file's order, and brought back by the name of the base's own
        stored = f"{module}.weight" if factor == "b" else f"{module}.down"
        end = tensor.offset + tensor.num_bytes
        header = TensorHeader(tensor.kind, tensor.shape, (tensor.offset, end), path.name, stored)
        pairs.setdefault(module, {})[factor.upper()] = header
    factors = {}
    for module, pair in pairs.items():
        found = _factors(path.name, module, pair, 1.0)
        factors[module] = msgspec.structs.replace(found, scale=alpha / found.rank)
    return AdapterFiles(path, factors, is_gguf=True)
