"""Defines llama.cpp's samplers and settings, under llama.cpp's names, for generation routes."""

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
"""Maps the names and aliases of samplers, without separators, to the main names.

llama.cpp accepts the same spellings.
"""

_ASK_NOTHING = ("adaptive_p",)
"""Samplers that this server lacks but does not report as ignored.

These samplers do nothing unless a setting turns them on. The setting is reported instead.
"""


class SamplerOrder(msgspec.Struct, frozen=True):
    """Reads the order of samplers: an array of names, or a string with one letter per sampler.

    Returns the names of the supported samplers, or None for the default order. An empty value asks
    for the default order.
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
    """A sampler's setting. Values of at most `bound` turn the sampler off.

    If `is_upper`, values of at least `bound` turn the sampler off.
    """

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
    "mirostat": Integer(0, 2),
    "mirostat_tau": Number(0, 100),
    "mirostat_eta": Number(0, 100),
    "dry_multiplier": Number(0, 100),
    "dry_base": Number(1, 100),
    "dry_allowed_length": Integer(low=0),
    "dry_penalty_last_n": Integer(low=-1),
    "dry_sequence_breakers": Array(String(most=40), 32),
}
"""Supported settings. Each setting has the same name as the setting's field in Sampling."""

ASKED = frozenset((*SETTINGS, "samplers"))
"""The fields of a body that ask for llama.cpp's samplers."""

_LACKING: Mapping[str, tuple[Kind, tuple[Any, ...]]] = {
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
"""Fields of llama.cpp that have no effect here, with their neutral values.

A neutral value asks for nothing, so the field is not reported as ignored.
"""

FIELDS: Mapping[str, Kind] = {
    **SETTINGS,
    "samplers": SamplerOrder(),
    **{name: kind for name, (kind, _) in _LACKING.items()},
}


def without_effect(table: Mapping[str, Kind], body: Mapping[str, Any]) -> Iterator[str]:
    """Yield unsupported fields and samplers that a checked body asks for."""
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
    """Return the samplers' names, with letters and other spellings replaced by llama.cpp's names.

    `value` is the field `samplers` after its check. Unknown names are returned unchanged.
    """
    if type(value) is str:
        return (_LETTERS.get(letter, letter) for letter in value)
    plain = (name.lower().replace("_", "").replace("-", "") for name in value)
    return (_NAMES.get(short, name) for short, name in zip(plain, value, strict=True))
