"""Fields of a request from the command line: `-o temperature=0.2 -o stop=END`."""

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.core.errors import ConfigError
from headrace.core.settings import nearest


def read_fields(pairs: Iterable[str], known: Iterable[str]) -> dict[str, Any]:
    """Values are JSON where they are valid JSON, else text; ConfigError for an unknown name."""
    names = set(known)
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise ConfigError(f"-o takes field=value, such as temperature=0.2; {pair!r} has no =.")
        if name not in names:
            raise ConfigError(f"-o: unknown field {name}{nearest(name, names)}")
        fields[name] = _value(text)
    return fields


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
