"""Reads the list of models with short names that ships with the package."""

import datetime
import functools
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

_PROCESS_BYTES = 1_200_000_000
_CACHE_SHARE = 0.15


class CatalogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that people can name in one word.

    `parameters` and `active` count billions; `active` is set for mixtures of experts. `source` is
    the page of the revision whose size and licence were read on the day `checked`.
    """

    name: str
    about: str
    kind: Literal["dense", "MoE", "embedding"]
    parameters: float
    bytes: int
    license: str
    source: str
    checked: datetime.date
    file: str = ""  # hub id and quantization; "" for a model of the package index
    active: float | None = None

    @property
    def memory_bytes(self) -> int:
        return memory_for(self.bytes)


def memory_for(num_bytes: int) -> int:
    """Estimate the memory for weights of this size, one conversation's cache, and the server."""
    return round(num_bytes * (1 + _CACHE_SHARE)) + _PROCESS_BYTES


def usable_bytes(installed: int) -> int:
    """Return how much of the installed memory a model and its server may use: three quarters.

    The rest is left to the system and other programs.
    """
    return installed * 3 // 4


@functools.cache
def catalog() -> dict[str, CatalogEntry]:
    """Return the entries by name, from the smallest model to the largest."""
    rows = tomllib.loads((Path(__file__).parent / "catalog.toml").read_text())["models"]
    entries = msgspec.convert(rows, list[CatalogEntry])
    return {it.name: it for it in sorted(entries, key=lambda it: it.bytes)}


def hub_id_of(name: str) -> str:
    """Return the hub id that a short name stands for; other names are returned unchanged."""
    entry = catalog().get(name)
    return entry.file if entry is not None and entry.file else name
