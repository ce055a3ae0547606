"""llama.cpp's samplers and their settings by its own names, on every route that generates."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.protocols.fields.kinds import (
    Array,
    Flag,
    Integer,
    Kind,
    Number,
    Object,
    String,
    items_of,
    wrong_type,
)
from headrace_common import sampling

_MAX_SAMPLERS = 64
_LETTERS = {
    **{"d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p"},
    **{"t": "temperature", "x": "xtc", "i": "infill", "e": "penalties", "a": "adaptive_p"},
}
_NAMES = {name.replace("_", ""): name for name in _LETTERS.values()} | {
    **{"temp": "temperature", "nucleus": "top_p"},
    **dict.fromkeys(("typ", "typical", "typicalp"), "typ_p"),
}
"""Names by their form without separators, as llama.cpp also reads them, and its aliases."""

_ASK_NOTHING = ("dry", "adaptive_p")
"""Samplers that we lack; they do nothing without a setting, which the header names instead."""


class SamplerOrder(msgspec.Struct, frozen=True):
    """An array of names, or a string with a letter for each; empty: the default order.

    Reads as the names of samplers that we have; None if the order is the default.
    """

    def check(self, value: Any, path: str) -> tuple[str, ...] | None:
        if type(value) is str:
            String(most=_MAX_SAMPLERS).check(value, path)
        else:
            wanted = "an array of names or a string of letters"
            if type(value) is not list:
                raise wrong_type(value, path, wanted)
            for each in items_of(value, path, 0, _MAX_SAMPLERS):
                String().check(*each)
        if not value:
            return None
        return tuple(name for name in _names(value) if name in sampling.SETTINGS)

    def schema(self) -> dict[str, Any]:
        names = Array(String(), _MAX_SAMPLERS).schema()
        return {"anyOf": [names, String(most=_MAX_SAMPLERS).schema()]}


class _Switch(msgspec.Struct, frozen=True):
    """A number that turns a sampler off if it is at least (or at most) `bound`."""

    bound: float
    off: float
    is_upper: bool = False

    def check(self, value: Any, path: str) -> float:
        number = _ANY.check(value, path)
        is_off = number >= self.bound if self.is_upper else number <= self.bound
        return self.off if is_off else number

    def schema(self) -> dict[str, Any]:
        return _ANY.schema()


_ANY = Number(-1e30, 1e30)

SETTINGS: Mapping[str, Kind] = {
    "repeat_last_n": Integer(low=-1),
    "typical_p": _Switch(1, 1.0, is_upper=True),
    "top_n_sigma": _Switch(0, -1.0),
    "xtc_probability": _Switch(0, 0.0),
    "xtc_threshold": _ANY,
    "dynatemp_range": _Switch(0, 0.0),
    "dynatemp_exponent": _ANY,
    "min_keep": Integer(),
}
"""Settings with effect, as the fields of Sampling of the same names."""

_LACKING: Mapping[str, tuple[Kind, tuple[Any, ...]]] = {
    "mirostat": (Integer(), (0,)),
    "mirostat_tau": (_ANY, (5,)),
    "mirostat_eta": (_ANY, (0.1,)),
    "dry_multiplier": (_ANY, (0,)),
    "dry_base": (_ANY, (1.75,)),
    "dry_allowed_length": (Integer(), (2,)),
    "dry_penalty_last_n": (Integer(), (-1, 0, 64)),
    "dry_sequence_breakers": (Array(String(), 1024), (["\n", ":", '"', "*"], [])),
    "adaptive_target": (_ANY, (-1,)),
    "adaptive_decay": (_ANY, (0.9,)),
    "n_keep": (Integer(), (0,)),
    "n_discard": (Integer(), (0,)),
    "n_indent": (Integer(), (0,)),
    "t_max_predict_ms": (_ANY, (0, -1)),
    "id_slot": (Integer(), (-1,)),
    "response_fields": (Array(String(), 1024), ([],)),
    "n_cache_reuse": (Integer(), (0,)),
    "backend_sampling": (Flag(), (False,)),
    "post_sampling_probs": (Flag(), (False,)),
    "lora": (Array(Object(), 1024), ([],)),
}
"""Fields of llama.cpp without effect here, with the values that ask for nothing."""

FIELDS: Mapping[str, Kind] = {
    **SETTINGS,
    "samplers": SamplerOrder(),
    **{name: kind for name, (kind, _) in _LACKING.items()},
}


def without_effect(table: Mapping[str, Kind], body: Mapping[str, Any]) -> Iterator[str]:
    """Name the fields of a checked body that ask for what we lack, and unknown samplers."""
    for name, value in body.items():
        if name in _LACKING and name in table and value is not None:
            if value not in _LACKING[name][1]:
                yield name
        elif name == "samplers" and name in table and value:
            known = (*sampling.SETTINGS, *_ASK_NOTHING)
            yield from dict.fromkeys(
                f"samplers.{sampler}" for sampler in _names(value) if sampler not in known
            )


def _names(value: str | list[str]) -> Iterator[str]:
    """The samplers of a checked order by the first of their names, or as they were sent."""
    if type(value) is str:
        return (_LETTERS.get(letter, letter) for letter in value)
    plain = (name.lower().replace("_", "").replace("-", "") for name in value)
    return (_NAMES.get(short, name) for short, name in zip(plain, value, strict=True))
