"""Converts between settings and a JSON document with a list of models to serve."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace_common.config.settings import ModelConfig, ServerConfig
from headrace_common.config.sources import Setting, folder_models, nearest, own_settings, settings
from headrace_common.errors import ConfigError, RequestError

MAX_MODELS = 1024
Configs = tuple[ModelConfig, ...]


def read_document(document: Any, named: Callable[[Configs], Configs]) -> Configs:
    """Read {"models": [{"model": …, …}]}. Raises RequestError with the path of a mistake.

    `named` gives each model its names, which must be unique. Settings have the names and types of
    [[models]] in the TOML file. A missing setting has its default.
    """
    if not isinstance(document, dict):
        raise _wrong("", "The document must be an object with a list `models`.")
    for key in document:
        if key != "models":
            raise _wrong(key, f"Unknown key {key!r}; the only allowed key is models.")
    tables = document.get("models")
    if not isinstance(tables, list) or not 0 < len(tables) <= MAX_MODELS:
        raise _wrong("models", f"models must be an array of 1 to {MAX_MODELS} objects.")
    known = _known()
    configs = tuple(_model(table, f"models[{i}]", known) for i, table in enumerate(tables))
    names = [config.served_model_name for config in named(configs)]
    counted = Counter(name for own in names for name in own)
    for i, own in enumerate(names):
        for name in own:
            if counted[name] > 1:
                path = f"models[{i}].served_model_name"
                message = f"{counted[name]} models are named {name!r}; give each its own name."
                raise _wrong(path, message)
    return configs


def to_document(configs: tuple[ModelConfig, ...]) -> dict[str, Any]:
    """Turn settings into a document. Settings that have their defaults are left out."""
    return {"models": [_table(config) for config in configs]}


def reread_folder(config: ServerConfig) -> tuple[ModelConfig, ...]:
    """Read the models folder again, and return the models in the folder.

    If the folder no longer contains models, return the current models.
    """
    folder = config.loading.models_dir
    if folder is None:
        return config.models
    try:
        found = folder_models(Path(folder), "--models-dir")
    except ConfigError:
        return config.models
    root = Path(folder).expanduser()
    within = [one for one in config.models if Path(one.model).parent == root]
    beside = tuple(one for one in config.models if one not in within)
    replace = msgspec.structs.replace
    return beside + tuple(
        replace(within[0], model=one["model"], served_model_name=tuple(one["served_model_name"]))
        for one in found
    )


def _known() -> dict[str, Setting]:
    return {one.name: one for one in settings() if one.path[0] == "models"}


def _model(table: Any, path: str, known: dict[str, Setting]) -> ModelConfig:
    if not isinstance(table, dict):
        raise _wrong(path, f"{path} must be an object.")
    for key in table:
        if key not in known:
            raise _wrong(f"{path}.{key}", f"Unknown setting {key!r}{nearest(key, known)}")
    if "model" not in table:
        raise _wrong(f"{path}.model", f"{path} has no model; name its folder or id.")
    for key, value in table.items():
        if value is None and known[key].default is not None:
            raise _wrong(f"{path}.{key}", f"{key} must be {known[key].allowed}, not null.")
        try:
            msgspec.convert(own_settings(known, {key: value}), ModelConfig)
        except msgspec.ValidationError:
            raise _wrong(f"{path}.{key}", f"{key} must be {known[key].allowed}.") from None
    return msgspec.convert(own_settings(known, table), ModelConfig)


def _table(config: ModelConfig) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, setting in _known().items():
        value: Any = config
        for part in setting.path[1:]:
            value = getattr(value, part)
        if name == "model" or value != setting.default:
            table[name] = list(value) if isinstance(value, tuple) else value
    return table


def _wrong(path: str, message: str) -> RequestError:
    return RequestError("invalid_value", message, path or None)
