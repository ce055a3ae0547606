"""Names and aliases by which clients ask for models; by default a name comes from the path."""

import os
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Generic, Protocol, TypeVar

import msgspec

from headrace_common.checkpoints.find import place_of
from headrace_common.checkpoints.gguf_folder import stem_of
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ConfigError, RequestError

LATEST = ":latest"
"""Clients of Ollama may write this after any name."""
_SHOWN = 100  # characters of an unknown name


class Named(Protocol):
    """A model that clients find by its names or, though it is not listed, by its path."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def paths(self) -> frozenset[str]: ...


def names_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the names that clients may use, never a path; the model's files are not read."""
    return config.served_model_name or (root_of(config),)


def adapters_of(config: ModelConfig) -> dict[str, str]:
    """Return the paths of the adapters in the settings, by the adapters' names."""
    return {name: path for name, _, path in (it.partition("=") for it in config.adapter)}


def root_of(config: ModelConfig) -> str:
    """Return the name of the model's folder or file, without `.gguf`; for a hub's model its id."""
    return _parts(config)[-1]


def paths_of(config: ModelConfig) -> frozenset[str]:
    """Return the spellings of a local model's path, which earlier versions used as its names."""
    given = config.model
    if place_of(given) is None:
        return frozenset()
    whole = os.path.abspath(os.path.expanduser(given))
    return frozenset((given, os.path.normpath(given), whole, os.path.relpath(whole)))


def called(model: Named, asked: str | None) -> str:
    """The model's name in an answer: the one in the request, but never a path."""
    return asked if asked in model.names else model.names[0]


class Aliases:
    """Further names of models and adapters: settings of the form NAME=MODEL."""

    def __init__(self, pairs: Iterable[str] = ()) -> None:
        split = [pair.partition("=") for pair in pairs]
        self.fixed = {name: model for name, _, model in split if "*" not in name}
        # Of fnmatch's special characters, aliases use only *.
        self._patterns = [
            (name.replace("[", "[[]").replace("?", "[?]"), model)
            for name, _, model in split
            if "*" in name
        ]

    def model(self, name: str) -> str | None:
        """Return the model of the alias `name`: the exact alias, or else the first that matches."""
        for spelling in (name, name.removesuffix(LATEST)):
            if spelling in self.fixed:
                return self.fixed[spelling]
        return next((model for it, model in self._patterns if fnmatchcase(name, it)), None)


ByName = TypeVar("ByName", bound=Named)


class Models(Generic[ByName]):
    """The served models, by the names that clients ask for."""

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
        """Return the model with this name, or else with this path, if there is one.

        Clients of Ollama may write `:latest` after any name.
        """
        for model in self._models:
            if name in model.names:
                return model
        for model in self._models:
            if name in model.paths:
                return model
        return self.find(name.removesuffix(LATEST)) if name.endswith(LATEST) else None

    def resolve(self, name: str) -> str:
        """Return the name of the model or adapter that a client means by `name`.

        An alias gives the name that it stands for. A path, or a name that nobody has, stays as it
        is.
        """
        if (model := self.find(name)) is not None:
            short = name.removesuffix(LATEST)
            return short if name not in model.names and short in model.names else name
        meant = self._aliases.model(name)
        return name if meant is None or self.find(meant) is None else meant

    def answering(self, name: str) -> ByName | None:
        """Return the model that answers to a name, a path or an alias, if there is one."""
        return self.find(self.resolve(name))

    @property
    def aliases(self) -> dict[str, str]:
        """The aliases without *, each with the name that it stands for."""
        fixed = {name: self.resolve(name) for name in self._aliases.fixed}
        return {name: meant for name, meant in fixed.items() if meant != name}

    def get(self, name: str | None) -> ByName:
        """The model that answers to `name`; without a name, the first one."""
        return self.exact(None if name is None else self.resolve(name))

    def exact(self, name: str | None) -> ByName:
        """Return the model of a name that `resolve` gave; RequestError if it was removed since.

        No alias may take the place of that model.
        """
        if name is None:
            return self.first
        if (model := self.find(name)) is not None:
            return model
        raise self.unknown(name)

    def unknown(self, name: str) -> RequestError:
        """The error for a name that no model has."""
        names = [name for model in self._models for name in model.names]
        served = ", ".join((*names, *self.aliases))
        return RequestError(
            "model_not_found",
            f"No model {name[:_SHOWN]!r} is served here; there is: {served}.",
            "model",
        ).noting(asked=name[:_SHOWN], served=served)


def settled_aliases(pairs: Iterable[str], configs: Iterable[ModelConfig]) -> tuple[str, ...]:
    """Return the aliases, each with the name of its model, which may be given as a path or hub id.

    ConfigError if a model is not served, or if one alias stands for two.
    """
    names: dict[str, str] = {}
    places: dict[str, str] = {}
    for config in configs:
        names |= {name: name for name in (*names_of(config), *adapters_of(config))}
        places |= dict.fromkeys((config.model, *paths_of(config)), names_of(config)[0])
    settled: dict[str, str] = {}
    for alias, _, given in (pair.partition("=") for pair in pairs):
        model = names.get(given) or places.get(given)
        if model is None:
            raise ConfigError(
                f"--alias {alias}={given}: no model or adapter is named {given!r}; there is: "
                f"{', '.join(names)}."
            )
        if settled.setdefault(alias, model) != model:
            raise ConfigError(
                f"--alias {alias} is given for {settled[alias]!r} and {model!r}; keep one of them."
            )
    return tuple(f"{alias}={model}" for alias, model in settled.items())


def told_apart(configs: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
    """Return the settings of the models, each with a name.

    If several models would get the same name, each name begins with as many parent folders as are
    needed to make them different. Models with the same path keep the same name.
    """
    places = {n: _parts(config) for n, config in enumerate(configs) if not config.served_model_name}
    taken = {name for config in configs for name in config.served_model_name}
    lengths = dict.fromkeys(places, 1)
    while True:
        names = {n: "/".join(place[-lengths[n] :]) for n, place in places.items()}
        sharing: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
        for n, place in places.items():
            sharing[names[n]].add(place)
        shared = taken | {name for name, all_of_it in sharing.items() if len(all_of_it) > 1}
        short = [n for n in names if names[n] in shared and lengths[n] < len(places[n])]
        if not short:
            break
        for n in short:
            lengths[n] += 1
    return tuple(
        msgspec.structs.replace(config, served_model_name=(names[n],)) if n in names else config
        for n, config in enumerate(configs)
    )


def _parts(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the folders above the model, and last the model's own name."""
    place = place_of(config.model)
    if place is None:
        return (config.model,)
    return (*place.parts[1:-1], stem_of(place.name) or config.model)
