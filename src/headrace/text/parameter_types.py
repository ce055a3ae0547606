"""Finds the JSON types of a tool's parameters, for calls that write strings without quotes."""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.text.json_schema import TYPES
from headrace.text.schema_references import SchemaTargets

_ALL = frozenset(TYPES)
_NONE = frozenset[str]()
_BY_CLASS: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    str: "string",
    list: "array",
    dict: "object",
}


def json_type(value: Any) -> str:
    """Return the JSON type of a value. Numbers with a fraction or exponent are not integers."""
    return _BY_CLASS.get(type(value), "number")


def parameter_types(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the JSON types of each parameter that can be a string, given a tool's JSON Schema.

    Parameters that can have any type are left out. The schema is not validated yet, so its
    keywords can have any values.
    """
    reader = _TypeReader(schema)
    found: dict[str, frozenset[str]] = {}
    try:
        for name, node in reader.properties(schema):
            found[name] = found.get(name, _NONE) | (reader.types(node) or _ALL)
    # A chain of references exceeds Python's stack. The remaining parameters are left out.
    except RecursionError:
        pass
    return {
        name: tuple(it for it in TYPES if it in types)
        for name, types in found.items()
        if "string" in types and types != _ALL
    }


class _TypeReader:
    """Finds the types that the schemas within a schema allow; reads each schema only once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets: SchemaTargets | None = None
        self._types: dict[int, frozenset[str]] = {}
        self._entered = set[int]()

    def properties(self, node: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name and the schema of each property; a name can occur several times."""
        if not isinstance(node, dict) or id(node) in self._entered:
            return
        self._entered.add(id(node))
        listed = node.get("properties")
        yield from listed.items() if isinstance(listed, dict) else ()
        for name in ("anyOf", "oneOf", "allOf"):
            for below in _listed(node, name):
                yield from self.properties(below)
        yield from self.properties(self._target(node))

    def types(self, node: Any) -> frozenset[str]:
        if not isinstance(node, dict):
            return _NONE if node is False else _ALL
        if id(node) not in self._types:
            # A schema that contains itself adds no types to itself.
            self._types[id(node)] = _NONE
            self._types[id(node)] = self._read(node)
        return self._types[id(node)]

    def _read(self, node: dict[str, Any]) -> frozenset[str]:
        found = _named(node) & self.types(self._target(node))
        for name in ("anyOf", "oneOf"):
            if options := _listed(node, name):
                found &= _NONE.union(*map(self.types, options))
        for below in _listed(node, "allOf"):
            found &= self.types(below)
        if values := _listed(node, "enum") or ([node["const"]] if "const" in node else []):
            found &= _widened(map(json_type, values))
        # In OpenAPI 3.0, this keyword adds null to the types.
        return found | {"null"} if node.get("nullable") is True else found

    def _target(self, node: dict[str, Any]) -> Any:
        """Return the schema that a schema refers to; True if there is none."""
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return True
        self._targets = self._targets or SchemaTargets(self._root, "")
        found = self._targets.find(reference, node)
        return found[0] if found else True


def _named(node: dict[str, Any]) -> frozenset[str]:
    given = node.get("type")
    names = given if isinstance(given, list) else [given]
    return _widened(it for it in names if isinstance(it, str) and it in TYPES) or _ALL


def _widened(names: Iterator[str]) -> frozenset[str]:
    """Return the names, with "integer" if "number" is there: every integer is a number."""
    found = frozenset(names)
    return found | {"integer"} if "number" in found else found


def _listed(node: dict[str, Any], name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []
