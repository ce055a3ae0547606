"""Names of a model for clients: those of its settings, or one made of where it lies."""

import os
from collections import defaultdict
from typing import Protocol

import msgspec

from headrace.checkpoints.find import place_of
from headrace.checkpoints.gguf_folder import stem_of
from headrace.config.settings import ModelConfig


class Named(Protocol):
    """A model that answers to its names and, unlisted, to the path that it was given by."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def paths(self) -> frozenset[str]: ...


def names_of(config: ModelConfig) -> tuple[str, ...]:
    """The names that clients may use, without a look at the model's files; never a path."""
    return config.served_model_name or (root_of(config),)


def adapters_of(config: ModelConfig) -> dict[str, str]:
    """The paths of the adapters that the settings name, by their names."""
    return {name: path for name, _, path in (it.partition("=") for it in config.adapter)}


def root_of(config: ModelConfig) -> str:
    """The name of the model's folder or file, without `.gguf`; of a hub's model its id."""
    return _parts(config)[-1]


def paths_of(config: ModelConfig) -> frozenset[str]:
    """Spellings of the path by which earlier versions served it; none of a hub's model."""
    given = config.model
    if place_of(given) is None:
        return frozenset()
    whole = os.path.abspath(os.path.expanduser(given))
    return frozenset((given, os.path.normpath(given), whole, os.path.relpath(whole)))


def called(model: Named, asked: str | None) -> str:
    """The model's name in an answer: the one in the request, but never a path."""
    return asked if asked in model.names else model.names[0]


def told_apart(configs: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
    """The same, each with its names.

    Where several would share one, as many folders stand before each as tell them apart. Models of
    one and the same path share it all the same.
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
    """The folders to where it lies, its own name last."""
    place = place_of(config.model)
    if place is None:
        return (config.model,)
    return (*place.parts[1:-1], stem_of(place.name) or config.model)
