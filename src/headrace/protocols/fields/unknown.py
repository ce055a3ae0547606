"""Finds unknown fields, which have no effect, in the nested objects of a body."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

from headrace_common.request import Route

_MAX_NAMED = 16
_MAX_PATH, _MAX_HEADER = 200, 1900  # characters
# All visible ASCII except the comma, quotes and the percent sign.
_SAFE = "!#$&'()*+-./:;<=>?@[]^_`{|}~"

Known = Mapping[str, Any]
"""Maps the name of each known field of an object to a description of the field's value.

None means that the value is not examined. A Known describes an object. A list with one entry
describes an array. The entry is the Known of all items, or a dict with a Known for each type of
item.
"""


def _names(names: str, **within: Any) -> Known:
    return {**dict.fromkeys(names.split()), **within}


_CALL = _names(
    "id type index",
    function=_names("name arguments strict index"),
    custom=_names("name input"),
)
_CACHED = "type cache_control"
_PARTS = {
    **dict.fromkeys(
        ("text", "input_text", "output_text"),
        _names(f"{_CACHED} text annotations logprobs citations"),
    ),
    "image_url": _names(_CACHED, image_url=_names("url detail format")),
}
_SCHEMA = _names("name description schema strict")
_FUNCTION = _names("name description parameters strict")
_TOOL = {"function": _names(_CACHED, function=_FUNCTION)}
_CHAT: Known = {
    "response_format": _names("type schema", json_schema=_SCHEMA),
    "stream_options": _names("include_usage continuous_usage_stats include_obfuscation"),
    "tools": [_TOOL],
    "messages": [
        _names(
            "role name tool_call_id refusal reasoning_content reasoning thinking annotations audio "
            "function_call cache_control id",
            content=[_PARTS],
            tool_calls=[_CALL],
        )
    ],
}
_ITEMS = {
    "message": _names("type role id status phase", content=[_PARTS]),
    "function_call": _names("type id call_id name arguments status namespace"),
    "function_call_output": _names("type id call_id output status"),
}
_BLOCKS = {
    "text": _names(f"{_CACHED} text citations"),
    "image": _names(_CACHED, source=_names("type media_type data url")),
    "tool_use": _names(f"{_CACHED} id name input caller"),
    "tool_result": _names(f"{_CACHED} tool_use_id content is_error"),
    "thinking": _names("type thinking signature"),
}
_CUSTOM = _names(f"{_CACHED} name description input_schema strict input_examples")
_BY_ROUTE: Mapping[str, Known] = {
    "/v1/responses": {
        "text": _names("verbosity", format=_names("type name description schema strict")),
        "reasoning": _names("effort summary generate_summary"),
        "stream_options": _names("include_obfuscation"),
        "tools": [{"function": _names("type name description parameters strict")}],
        "input": [_ITEMS],
    },
    "/v1/messages": {
        "output_config": _names("effort", format=_names("type schema")),
        "output_format": _names("type schema"),
        "tool_choice": _names("type name disable_parallel_tool_use"),
        "tools": [{"custom": _CUSTOM, "": _CUSTOM}],
        "messages": [_names("role clear_at", content=[_BLOCKS])],
    },
    "/api/chat": {
        "tools": [_TOOL],
        "messages": [
            _names(
                "role content thinking images tool_name tool_call_id name",
                tool_calls=[_names("id type", function=_names("name arguments index id"))],
            )
        ],
    },
    "/api/generate": {},
}


def unknown_within(body: Mapping[str, Any], route: Route) -> tuple[str, ...]:
    """Return the paths of unknown fields in a body's nested objects, but only the first few."""
    known = _BY_ROUTE.get(route, _CHAT)
    found = (
        path for name, inner in known.items() for path in _unknown(body.get(name), inner, name)
    )
    return tuple(islice(found, _MAX_NAMED))


def _unknown(value: Any, known: Any, path: str) -> Iterator[str]:
    if isinstance(known, list) and isinstance(value, list):
        for i, item in enumerate(value):
            kinds = known[0]
            if isinstance(item, dict) and all(isinstance(it, Mapping) for it in kinds.values()):
                kinds = kinds.get(str(item.get("type") or _default(kinds)))
            yield from _unknown(item, kinds, f"{path}[{i}]")
    elif isinstance(known, Mapping) and isinstance(value, dict):
        for name, item in value.items():
            if name not in known:
                if item is not None:
                    yield f"{path}.{name}"
            else:
                yield from _unknown(item, known[name], f"{path}.{name}")


def _default(kinds: Mapping[str, Any]) -> str:
    """Return the type of an item that has no field `type`."""
    return "" if "" in kinds else next(iter(kinds))


def renamed(paths: Iterable[str], own: Iterable[tuple[re.Pattern[str], str]]) -> Iterator[str]:
    """Replace paths of chat's fields with a dialect's own paths for the same fields."""
    rules = tuple(own)
    for path in paths:
        for known, name in rules:
            path = known.sub(name, path)
        yield path


def header_of(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths encoded for a header. A last entry "..." stands for the remaining paths."""
    shown: list[str] = []
    left = _MAX_HEADER
    for path in dict.fromkeys(paths):
        name = quote(path[:_MAX_PATH], safe=_SAFE)
        left -= len(name) + 2
        if left < 0:
            return (*shown, "...")
        shown.append(name)
    return tuple(shown)
