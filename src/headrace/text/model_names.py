"""Finds models by the names and aliases in requests.

By default, a model's name is derived from its path.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Generic, Protocol, TypeVar

import msgspec

from headrace_common.checkpoints.find import place_of
from headrace_common.checkpoints.gguf_file_names import stem_of
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ConfigError, RequestError

LATEST = ":latest"
"""Clients of Ollama can append this suffix to any name."""
_SHOWN = 100  # characters of an unknown name in an error


class Named(Protocol):
    """A model that can be requested by a name or a path; model lists show only the names."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def paths(self) -> frozenset[str]: ...


def names_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the model's names for clients, which are never paths. Reads no model files."""
    return config.served_model_name or (root_of(config),)


def adapters_of(config: ModelConfig) -> dict[str, str]:
    """Return the paths of the adapters in the settings, by the adapters' names."""
    return {name: path for name, _, path in (it.partition("=") for it in config.adapter)}


def root_of(config: ModelConfig) -> str:
    """Return the model's hub id, or the name of the model's folder or file without `.gguf`."""
    return _path_parts(config)[-1]


def paths_of(config: ModelConfig) -> frozenset[str]:
    """Return the spellings of a local model's path, which earlier versions used as model names."""
    given = config.model
    if place_of(given) is None:
        return frozenset()
    whole = os.path.abspath(os.path.expanduser(given))
    return frozenset((given, os.path.normpath(given), whole, os.path.relpath(whole)))


def called(model: Named, asked: str | None) -> str:
    """Return `asked` if it is a name of the model, else the model's first name; never a path."""
    return asked if asked in model.names else model.names[0]


class Aliases:
    """Additional names of models and adapters, from settings in the format NAME=MODEL."""

    def __init__(self, pairs: Iterable[str] = ()) -> None:
        split = [pair.partition("=") for pair in pairs]
        self.fixed = {name: model for name, _, model in split if "*" not in name}
        # In an alias only * is special, so the other special characters of fnmatch are escaped.
        self._patterns = [
            (name.replace("[", "[[]").replace("?", "[?]"), model)
            for name, _, model in split
            if "*" in name
        ]

    def model(self, name: str) -> str | None:
        """Return the model of an alias: an exact match, or else the first pattern that matches."""
        for spelling in (name, name.removesuffix(LATEST)):
            if spelling in self.fixed:
                return self.fixed[spelling]
        return next((model for it, model in self._patterns if fnmatchcase(name, it)), None)


ByName = TypeVar("ByName", bound=Named)


class Models(Generic[ByName]):
    """Finds the served models by the names in requests."""

    def __init__(self, models: tuple[ByName, ...], aliases: Aliases | None = None) -> None:
        self._models = models
        self._aliases = aliases or Aliases()

    def all(self) -> tuple[ByName, ...]:
        return self._models

    @property
    def first(self) -> ByName:
        """The model that answers requests without a name."""
        return self._models[0]

    def find(self, name: str) -> ByName | None:
        """Return the model with this name, or else the model with this path, or else None.

        Clients of Ollama can append `:latest` to any name.
        """
        for spelling in dict.fromkeys((name, name.removesuffix(LATEST))):
            for model in self._models:
                if spelling in model.names:
                    return model
            for model in self._models:
                if spelling in model.paths:
                    return model
        return None

    def resolve(self, name: str) -> str:
        """Return the name of the model or adapter that a client means by `name`.

        An alias is replaced by its model's name. A path or an unknown name is returned unchanged.
        """
        if (model := self.find(name)) is not None:
            short = name.removesuffix(LATEST)
            return short if name not in model.names and short in model.names else name
        meant = self._aliases.model(name)
        return name if meant is None or self.find(meant) is None else meant

    def answering(self, name: str) -> ByName | None:
        """Return the model for a name, a path or an alias, or None."""
        return self.find(self.resolve(name))

    @property
    def aliases(self) -> dict[str, str]:
        """The aliases without *, each with its model's name."""
        fixed = {name: self.resolve(name) for name in self._aliases.fixed}
        return {name: meant for name, meant in fixed.items() if meant != name}

    def get(self, name: str | None) -> ByName:
        """Return the model for a name, path or alias; without a name, the first model."""
        return self.exact(None if name is None else self.resolve(name))

    def exact(self, name: str | None) -> ByName:
        """Return the model for a name that `resolve` returned.

        Raises RequestError if the model was removed meanwhile. Aliases are ignored, so that another
        model cannot replace a removed model.
        """
        if name is None:
            return self.first
        if (model := self.find(name)) is not None:
            return model
        raise self.unknown(name)

    def unknown(self, name: str) -> RequestError:
        """Return the error for a name that no model has."""
        names = [name for model in self._models for name in model.names]
        served = ", ".join((*names, *self.aliases))
        return RequestError(
            "model_not_found",
            f"Model {name[:_SHOWN]!r} was not found. This server has: {served}.",
            "model",
        ).noting(asked=name[:_SHOWN], served=served)


def settled_aliases(pairs: Iterable[str], configs: Iterable[ModelConfig]) -> tuple[str, ...]:
    """Return the aliases, with each model's path or hub id replaced by the model's name.

    Raises ConfigError if a model is not served, or if the same alias is given for two models.
    """
    names: dict[str, str] = {}
    by_path: dict[str, str] = {}
    for config in configs:
        names |= {name: name for name in (*names_of(config), *adapters_of(config))}
        by_path |= dict.fromkeys((config.model, *paths_of(config)), names_of(config)[0])
    settled: dict[str, str] = {}
    for alias, _, given in (pair.partition("=") for pair in pairs):
        model = names.get(given) or by_path.get(given)
        if model is None:
            raise ConfigError(
                f"--alias {alias}={given}: no model or adapter is named {given!r}; served names: "
                f"{', '.join(names)}."
            )
        if settled.setdefault(alias, model) != model:
            raise ConfigError(
                f"--alias {alias} is given for {settled[alias]!r} and {model!r}; keep one of them."
            )
    return tuple(f"{alias}={model}" for alias, model in settled.items())


def with_unique_names(configs: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
    """Return the settings of the models, each with a unique name.

    If several models would get the same name, the names of parent folders are prepended until the
    model names differ. Models with the same path keep the same name.
    """
    paths = {
        n: _path_parts(config) for n, config in enumerate(configs) if not config.served_model_name
    }
    taken = {name for config in configs for name in config.served_model_name}
    lengths = dict.fromkeys(paths, 1)
    while True:
        names = {n: "/".join(path[-lengths[n] :]) for n, path in paths.items()}
        sharing: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
        for n, path in paths.items():
            sharing[names[n]].add(path)
        shared = taken | {name for name, all_of_it in sharing.items() if len(all_of_it) > 1}
        short = [n for n in names if names[n] in shared and lengths[n] < len(paths[n])]
        if not short:
            break
        for n in short:
            lengths[n] += 1
    return tuple(
        msgspec.structs.replace(config, served_model_name=(names[n],)) if n in names else config
        for n, config in enumerate(configs)
    )


def _path_parts(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the folders above the model, followed by the model's own name."""
    place = place_of(config.model)
    if place is None:
        return (config.model,)
    return (*place.parts[1:-1], stem_of(place.name) or config.model)
