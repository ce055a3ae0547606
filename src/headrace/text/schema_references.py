"""Resolves the references within a JSON Schema."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

_OPAQUE = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are not schemas, even if the values look like schemas."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names to schemas; a name can be spelled like a keyword."""


class SchemaTargets:
    """Finds the target of a reference: any object or boolean in the schema, by pointer or name."""

    def __init__(self, schema: Any, path: str) -> None:
        self._root, self._root_path = schema, path
        self._bases: dict[int, str] = {}
        self._named: dict[str, tuple[Any, str]] = {"": (schema, path)}
        level = [(schema, path, "", False)]
        while level:
            level = [below for each in level for below in self._enter(*each)]

    def _enter(
        self, value: Any, path: str, base: str, is_map: bool
    ) -> Iterator[tuple[Any, str, str, bool]]:
        """Register the names and the base address of a schema; yield the values below the
        schema.
        """
        if isinstance(value, dict):
            if isinstance(value.get("$id"), str):
                base = _joined(base, value["$id"])
                self._named.setdefault(urldefrag(base).url, (value, path))
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(value.get(name), str):
                    key = f"{urldefrag(base).url}#{value[name]}"
                    self._named.setdefault(key, (value, path))
            self._bases[id(value)] = base
            for name, item in value.items():
                if isinstance(item, dict | list) and (is_map or name not in _OPAQUE):
                    yield item, f"{path}.{name}", base, not is_map and name in _MAPS
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, dict | list):
                    yield item, f"{path}[{i}]", base, False

    def find(self, reference: str, schema: dict[str, Any]) -> tuple[Any, str] | None:
        document, fragment = urldefrag(_joined(self._bases.get(id(schema), ""), reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"{document}#{fragment}")
        found = self._named.get(document)
        for step in fragment.split("/")[1:]:
            if found is None:
                return None
            found = _below(*found, step.replace("~1", "/").replace("~0", "~"))
        return found if found and isinstance(found[0], dict | bool) else None


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    # The reference is not a valid address.
    except ValueError:
        return reference


def _below(value: Any, path: str, step: str) -> tuple[Any, str] | None:
    if isinstance(value, dict) and step in value:
        return value[step], f"{path}.{step}"
    if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
        return value[int(step)], f"{path}[{step}]"
    return None
