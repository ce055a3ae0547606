"""Finds the subschemas that no finite answer can satisfy."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

from headrace.text.json_schema import NUMERIC, TYPES, Node, ReadSchema
from headrace.text.number_patterns import NumberBounds, integer_range, is_whole, multiples


def bounds_of(node: dict[str, Any]) -> NumberBounds:
    """Return the bounds of a node's numbers."""
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    is_low_excluded = above is not None and (low is None or above >= low)
    is_high_excluded = below is not None and (high is None or below <= high)
    return NumberBounds(
        above if is_low_excluded else low,
        below if is_high_excluded else high,
        is_low_excluded,
        is_high_excluded,
    )


def type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, Decimal):
        return "integer" if _is_small(value) and is_whole(value) else "number"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _is_small(value: Decimal) -> bool:
    """Return whether the number can be written out in full.

    A larger number is always whole, but most programs read large numbers as floats.
    """
    return value.adjusted() < 1000


def _is_multiple(value: Decimal, step: Decimal) -> bool:
    is_small = _is_small(value) and abs(step.adjusted()) < 1000
    return is_small and Fraction(value) % Fraction(step) == 0


def holds(node: dict[str, Any], value: Any) -> bool:
    """Return whether a value has the type of a node and is within the node's bounds."""
    types, own = node.get("type", TYPES), type_of(value)
    if own not in types and not (own == "integer" and "number" in types):
        return False
    if isinstance(value, Decimal):
        step = node.get("multipleOf")
        return bounds_of(node).holds(value) and (step is None or _is_multiple(value, step))
    if isinstance(value, str):
        longest = node.get("maxLength", len(value))
        return bool(node.get("minLength", 0) <= len(value) <= longest)
    return True


def unsatisfied(schema: ReadSchema) -> str | None:
    """Return the path of a subschema that every answer must satisfy but no finite answer can
    satisfy.

    Returns None if there is no such subschema. In this case, unsatisfiable subschemas that answers
    can avoid are removed, because an answer inside such a subschema could never end.
    """
    known = _open_definitions(schema)
    if _is_open(schema.root, known):
        for node in (schema.root, *schema.definitions.values()):
            _close_parts(node, known)
        return None
    return _innermost(schema, schema.root, known)


def _open_definitions(schema: ReadSchema) -> set[str]:
    """Return the definitions that some finite answer satisfies. These definitions are called open.

    Whether a definition is open depends on the other definitions that are already found to be open.
    When a definition turns out to be open, only the definitions that refer to this definition are
    checked again. If all definitions were checked each time, a chain of references would take one
    round per link.
    """
    users: dict[str, list[str]] = {}
    for name, node in schema.definitions.items():
        for used in _references(node):
            users.setdefault(used, []).append(name)
    known: set[str] = set()
    waiting = list(schema.definitions)
    while waiting:
        name = waiting.pop()
        if name not in known and _is_open(schema.definitions[name], known):
            known.add(name)
            waiting += users.get(name, ())
    return known


def _references(node: Node) -> set[str]:
    found, level = set[str](), [node]
    while level:
        found |= {it["$ref"] for it in level if isinstance(it, dict) and "$ref" in it}
        level = [below for it in level for below in children(it)]
    return found


def _innermost(schema: ReadSchema, node: Node, known: set[str]) -> str:
    seen, path = set[int](), ""
    while isinstance(node, dict) and id(node) not in seen:
        seen.add(id(node))
        if "$ref" not in node or not path:
            path = schema.paths[id(node)]
        needed = [it for it in _needed(node) if not _is_open(it, known)]
        if "$ref" in node and node["$ref"] not in known:
            needed.append(schema.definitions[node["$ref"]])
        if not needed or not isinstance(needed[0], dict):
            break
        node = needed[0]
    return path


def _needed(node: dict[str, Any]) -> list[Node]:
    """Return the subschemas of a node that every answer for the node must satisfy."""
    found = list(node.get("allOf", ()))
    if node.get("type") in (None, ["object"]):
        names = node.get("required", ())
        found += [it for name, it in node.get("properties", {}).items() if name in names]
    if node.get("type") in (None, ["array"]):
        found += node.get("prefixItems", [])[: node.get("minItems", 0)]
    return found


def _is_open(node: Node, known: set[str]) -> bool:
    if isinstance(node, bool):
        return node
    if "$ref" in node and node["$ref"] not in known:
        return False
    if not all(_is_open(it, known) for it in node.get("allOf", ())):
        return False
    for name in ("anyOf", "oneOf"):
        if name in node and not any(_is_open(it, known) for it in node[name]):
            return False
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if values is not None:
        return any(holds(node, it) for it in values)
    return any(_is_type_open(node, it, known) for it in node.get("type", TYPES))


def _is_type_open(node: dict[str, Any], name: str, known: set[str]) -> bool:
    if name in ("integer", "number"):
        return not any(it in node for it in NUMERIC) or _has_number(node, name == "integer")
    if name == "string":
        return _is_ordered(node, "minLength", "maxLength")
    if name == "array":
        return _is_ordered(node, "minItems", "maxItems") and _has_items(node, known)
    if name == "object":
        return _is_ordered(node, "minProperties", "maxProperties") and _has_names(node, known)
    return True


def _is_ordered(node: dict[str, Any], low: str, high: str) -> bool:
    return high not in node or bool(node.get(low, 0) <= node[high])


def _has_number(node: dict[str, Any], is_integer: bool) -> bool:
    bounds, step = bounds_of(node), node.get("multipleOf")
    if step is not None and (found := multiples(bounds, step, is_integer)) is not None:
        return bool(found)
    low, high = integer_range(bounds) if is_integer else (bounds.low, bounds.high)
    if low is None or high is None:
        return True
    is_shut = not is_integer and (bounds.is_low_excluded or bounds.is_high_excluded)
    return low < high or (low == high and not is_shut)


def _has_items(node: dict[str, Any], known: set[str]) -> bool:
    least, first = node.get("minItems", 0), node.get("prefixItems", [])
    if not all(_is_open(it, known) for it in first[:least]):
        return False
    return least <= len(first) or _is_open(node.get("items", True), known)


def _has_names(node: dict[str, Any], known: set[str]) -> bool:
    required = node.get("required", ())
    if len(required) > node.get("maxProperties", len(required)):
        return False
    listed, others = node.get("properties", {}), node.get("additionalProperties", True)
    # The patterns are not compared with the names, so any name may match a pattern.
    if node.get("patternProperties"):
        others = True
    return all(_is_open(listed.get(name, others), known) for name in required)


def _close_parts(node: Node, known: set[str]) -> None:
    """Remove subschemas that no finite answer can satisfy, or replace these subschemas by
    `false`.
    """
    if isinstance(node, bool):
        return
    for name in ("properties", "patternProperties"):
        if name in node:
            node[name] = {k: it if _is_open(it, known) else False for k, it in node[name].items()}
    for name in ("anyOf", "oneOf"):
        if name in node:
            node[name] = [it for it in node[name] if _is_open(it, known)]
    for name in ("items", "additionalProperties"):
        if name in node and not _is_open(node[name], known):
            node[name] = False
    if "prefixItems" in node and not all(_is_open(it, known) for it in node["prefixItems"]):
        node["prefixItems"] = [it if _is_open(it, known) else False for it in node["prefixItems"]]
    for below in children(node):
        _close_parts(below, known)


def children(node: Node) -> list[Node]:
    """Return the schemas directly below a node, without the targets of references."""
    if isinstance(node, bool):
        return []
    found: list[Node] = []
    for name in ("properties", "patternProperties"):
        found += node.get(name, {}).values()
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        found += node.get(name, ())
    return found + [node[name] for name in ("items", "additionalProperties") if name in node]
