"""Hostile JSON: unexpected values at any position of a valid document."""

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

REGEXES = (
    "((([a-z_0-9.])+)+)+X",
    "(a|a)*b",
    "(.*)*(.*)*(.*)*Z",
    "(?:" * 5000 + ")" * 5000,
    "a{1,1000}{1,1000}{1,1000}",
    "(x+x+)+y",
    "[",
    "(?P<n>",
    "\\p{Nope}",
)
"""Regular expressions that take very long or much memory, or that are invalid."""

_MARK = "raw text stands here"


class Raw(str):
    """Text that is written into a document unchanged and without quotes."""


def nested(depth: int, opening: str = "[", closing: str = "]") -> Raw:
    return Raw(opening * depth + closing * depth)


_VALUES: tuple[Callable[[], Any], ...] = (
    *(lambda it=it: it for it in (None, True, 0, -1, 1, 0.5, -0.0, 1e308, math.nan, math.inf)),
    *(lambda n=n: n for n in (2**31, 2**32 - 1, 2**53 + 1, 2**63, -(2**63), 2**64, 10**400)),
    *(lambda it=it: it for it in ("", "a", "1", "\0", "\ud800", "true", "../../x", "~")),
    *(lambda it=it: it for it in REGEXES),
    lambda: "x" * 1_000_000,
    lambda: [],
    lambda: {},
    lambda: [[]],
    lambda: ["x"],
    lambda: [10**12],
    lambda: list(range(100_000)),
    lambda: {str(n): n for n in range(50_000)},
    lambda: Raw("9" * 5000),
    lambda: Raw("0." + "9" * 5000),
    lambda: nested(100_000),
    lambda: nested(100_000, '{"a":', "}").replace(":}", ":0}", 1),
)


def hostile_value(rng: random.Random) -> Any:
    return rng.choice(_VALUES)()


def dumped(document: Any) -> bytes:
    """Return the document as JSON, with its Raw texts inserted unchanged."""
    raw: list[str] = []

    def kept(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value)
            return f"{_MARK} {len(raw) - 1}"
        if isinstance(value, dict):
            return {key: kept(one) for key, one in value.items()}
        return [kept(one) for one in value] if isinstance(value, list) else value

    text = json.dumps(kept(document))
    for number, one in enumerate(raw):
        text = text.replace(f'"{_MARK} {number}"', one, 1)
    return text.encode()


def places(document: Any, longest: int = 2000) -> list[tuple[Any, Any]]:
    """Return up to `longest` pairs of a container and a key or index, outer ones first."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting and len(found) < longest:
        holder = waiting.pop(0)
        keys = list(holder) if isinstance(holder, dict) else range(min(len(holder), 20))
        for key in list(keys)[:60]:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found


def spoil(document: Any, rng: random.Random) -> str:
    """Changes one value of the document, and returns what was done."""
    found = places(document)
    if not found:
        return "nothing"
    holder, key = found[min(rng.randrange(len(found)), rng.randrange(len(found)))]
    kind = rng.choice(("set", "set", "set", "delete", "repeat", "exchange"))
    if kind == "delete":
        del holder[key]
    elif kind == "repeat" and isinstance(holder[key], list):
        holder[key] = (holder[key] * 1000)[:100_000]
    elif kind == "exchange":
        other, name = rng.choice(found)
        holder[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else other[name])
    else:
        holder[key] = hostile_value(rng)
        return f"{str(key)[:40]} set to {repr(holder[key])[:60]}"
    return f"{kind} {str(key)[:40]}"


def rewrite(file: Path, change: Callable[[Any], str]) -> str:
    """Changes a JSON file. Other hard links to the same file keep the old content."""
    document = json.loads(file.read_bytes())
    what = change(document)
    replace(file, dumped(document))
    return what


def replace(file: Path, content: bytes) -> None:
    """Replaces the file's content. Other hard links to the same file keep the old content."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)
