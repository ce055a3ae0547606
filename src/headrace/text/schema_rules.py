"""Writes a schema as grammars for the library llguidance, with exact numbers.

llguidance accepts JSON Schemas, but stores their numbers as doubles. If a number needs more
precision, the path from the root to the number is written as Lark rules. Everything else stays
JSON Schema. A node on such a path is called exact.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from headrace.text.json_schema import NUMERIC, TYPES, Node, ReadSchema, SchemaFinding
from headrace.text.number_patterns import (
    integer_pattern,
    is_whole,
    multiples,
    number_pattern,
    text_of,
)
from headrace.text.schema_limits import bounds_of, children, holds

SPACE = r"( |\n {0,12})?"
"""A pattern for white space in a JSON text: enough for indentation, but limited."""

MAX_GRAMMAR = 256 << 10
"""The maximum number of characters of a grammar, since grammars are stored and sent to the
engine.
"""

# Doubles hold all integers up to this number.
_SAFE = 1 << 53
_LAST_PLACE = Decimal("1e-22")
# 10 to the power of 22 is the last power of ten that a double holds exactly.
_MAX_PLACES = 22
_LARGEST_COEFFICIENT = (1 << 32) - 1
_STRING = r'"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"'
_EMPTY = '""'
_OF_OBJECTS = ("properties", "required", "additionalProperties")
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
_IN_PLACE = ("anyOf", "oneOf", "allOf", "$ref", "const", "enum")
_JOINING = {"anyOf", "oneOf", "allOf", "$ref"}
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")

Grammars = list[dict[str, Any]]


def is_plain(value: Any) -> bool:
    """Return whether llguidance keeps the value of a const or a bound unchanged.

    llguidance computes a number from an integer with the number's digits and a power of ten. The
    result is only exact if doubles hold both the integer and the power.
    """
    if isinstance(value, list | dict):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    if not isinstance(value, Decimal):
        return True
    if abs(value) > _SAFE:
        return False
    nearest = Decimal(repr(float(value)))
    places = _num_places(nearest)
    return nearest == value and places <= _MAX_PLACES and abs(nearest.scaleb(places)) <= _SAFE


def _num_places(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)


def is_plain_step(step: Decimal) -> bool:
    """Return whether llguidance finds all multiples of this step; imitates llguidance's
    arithmetic.
    """
    value, exponent = float(step), 0
    while value <= _LARGEST_COEFFICIENT and value % 1:
        value, exponent = value * 10, exponent + 1
    is_read = 0 < value <= _LARGEST_COEFFICIENT and exponent <= _MAX_PLACES
    return is_read and Decimal(int(value)).scaleb(-exponent) == step


def exact_values(node: Node) -> list[str]:
    """Return the keywords of this node whose values llguidance would not keep exactly."""
    if isinstance(node, bool):
        return []
    found = [name for name in NUMERIC[:-1] if name in node and not is_plain(node[name])]
    found += [name for name in ("const", "enum") if not is_plain(node.get(name))]
    step = node.get("multipleOf")
    if step is not None and not (is_plain_step(step) and _is_safe_step(node, step)):
        found.append("multipleOf")
    return found


def _is_safe_step(node: dict[str, Any], step: Decimal) -> bool:
    """Return whether llguidance accepts all multiples of the step.

    If the node has two bounds, llguidance computes in floats and can lose a multiple.
    """
    return is_whole(step) or None in bounds_of(node)[:2]


def settle(schema: ReadSchema) -> list[SchemaFinding]:
    """Remove the exact values that rules cannot express, or narrow these values to doubles.

    Rules must cover the whole path from the root to an exact value. If rules cannot express a node
    on the path, everything below the node stays JSON Schema, which cannot hold exact values.
    """
    rules = RuleWriter(schema, "")
    blocked: set[int] = set()
    for node in _all_nodes(schema):
        if id(node) in rules.exact_nodes and not rules.can_write(node):
            _block(schema, node, blocked)
    findings = []
    for node in _all_nodes(schema):
        if id(node) in blocked:
            findings += [it for name in exact_values(node) for it in _settled(schema, node, name)]
    return findings + _joined_steps(schema)


def _joined_steps(schema: ReadSchema) -> list[SchemaFinding]:
    """Remove all `multipleOf` if llguidance may need a common multiple that exceeds 32 bits."""
    nodes = _all_nodes(schema)
    steps = {it["multipleOf"] for it in nodes if "multipleOf" in it}
    fine = Decimal(1).scaleb(min((it.as_tuple().exponent for it in steps), default=0))
    product = math.prod(int(it / fine) for it in steps)
    joins = any(len(it) > 1 and it.keys() & _JOINING for it in nodes)
    joins |= any(len(it.get("allOf", ())) > 1 for it in nodes)
    if len(steps) < 2 or not joins or product <= _LARGEST_COEFFICIENT:
        return []
    findings = []
    for node in nodes:
        if node.pop("multipleOf", None) is not None:
            path = f"{schema.paths[id(node)]}.multipleOf"
            message = f"{path} cannot be enforced together with the other multipleOf; leave it out."
            findings.append(SchemaFinding(path, message))
    return findings


def _block(schema: ReadSchema, node: Node, blocked: set[int]) -> None:
    """Add to `blocked`: a node, everything below the node, and all targets of references."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool) or id(node) in blocked:
            continue
        blocked.add(id(node))
        waiting += children(node)
        if "$ref" in node:
            waiting.append(schema.definitions[node["$ref"]])


def _settled(schema: ReadSchema, node: dict[str, Any], name: str) -> Iterable[SchemaFinding]:
    is_low = name in ("minimum", "exclusiveMinimum")
    value = node[name]
    if name == "multipleOf" and is_plain_step(value):
        return
    del node[name]
    if name in NUMERIC[:-1] and (narrowed := _narrowed(value, is_low)) is not None:
        node[name] = narrowed
        return
    path = f"{schema.paths[id(node)]}.{name}"
    message = f"{path} has a number with too many digits to be enforced here"
    yield SchemaFinding(path, f"{message}; leave {name} out.")


def _narrowed(value: Decimal, is_low: bool) -> Decimal | None:
    """Narrow a bound to the nearest number that llguidance keeps; None if there is no such
    number.
    """
    if abs(value) > _SAFE:
        is_inside = (value < 0) == is_low
        return Decimal(_SAFE).copy_sign(value) if is_inside else None
    rounding = ROUND_CEILING if is_low else ROUND_FLOOR
    found = Context(prec=15, rounding=rounding).plus(value)
    return found.quantize(_LAST_PLACE, rounding) if _num_places(found) > _MAX_PLACES else found


def _all_nodes(schema: ReadSchema) -> list[dict[str, Any]]:
    level = [schema.root, *schema.definitions.values()]
    found: list[dict[str, Any]] = []
    while level:
        found += [node for node in level if isinstance(node, dict)]
        level = [below for node in level for below in children(node)]
    return found


def plain(value: Any) -> Any:
    """Return the value with numbers that JSON encoders support."""
    if isinstance(value, Decimal):
        return int(value) if is_whole(value) and abs(value) <= _SAFE else float(value)
    if isinstance(value, dict):
        return {name: plain(it) for name, it in value.items()}
    return [plain(it) for it in value] if isinstance(value, list) else value


def as_json_schema(schema: ReadSchema, node: Node) -> dict[str, Any]:
    """Return a node as a complete JSON Schema, with all definitions that the node needs."""
    needed: dict[str, Any] = {}
    waiting: list[str] = []

    def written(node: Node) -> Any:
        if isinstance(node, bool):
            return node
        found = dict(node)
        for name in ("properties", "patternProperties"):
            if name in node:
                found[name] = {key: written(it) for key, it in node[name].items()}
        for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if name in node:
                found[name] = [written(it) for it in node[name]]
        for name in ("items", "additionalProperties"):
            if name in node:
                found[name] = written(node[name])
        if "$ref" in node:
            name = node["$ref"]
            found["$ref"] = f"#/$defs/{name}"
            if name not in needed:
                needed[name] = True
                waiting.append(name)
        return found

    own = written(node)
    # Use a loop instead of recursion, because a chain of definitions can have thousands of links.
    while waiting:
        name = waiting.pop()
        needed[name] = written(schema.definitions[name])
    if isinstance(own, bool):
        own = {} if own else {"not": {}}
    return plain({"$defs": needed, **own} if needed else own)  # type: ignore[no-any-return]


def json_grammar(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    options = {"whitespace_pattern": SPACE}
    return {"name": name, "json_schema": {**schema, "x-guidance": options}}


def grammars_of(schema: ReadSchema, name: str) -> Grammars:
    """Return the grammars of a settled schema (see `settle`); the first grammar is called
    `name`.
    """
    rules = RuleWriter(schema, name)
    if not rules.needs_rules(schema.root):
        return [json_grammar(name, as_json_schema(schema, schema.root))]
    return rules.write(rules.rule(schema.root))


class RuleWriter:
    """Writes Lark rules for the paths from the root of a schema to the exact numbers."""

    def __init__(self, schema: ReadSchema, name: str) -> None:
        self._schema, self._name = schema, name
        self._lines: list[str] = []
        self._parts: Grammars = []
        self._num_written = 0  # characters of the grammars in `_parts`
        self._definitions: set[str] = set()
        # Definitions whose rules have not been written yet.
        self._waiting: list[str] = []
        self._rules: dict[int, str] = {}
        self.exact_nodes = self._find_exact()

    def _find_exact(self) -> set[int]:
        """Return the ids of the nodes with an exact number, and of all nodes that lead to such a
        node.
        """
        nodes = _all_nodes(self._schema)
        above: dict[int, list[int]] = {}
        for node in nodes:
            target = self._schema.definitions.get(node.get("$ref", ""), True)
            for below in (*children(node), target):
                if isinstance(below, dict):
                    above.setdefault(id(below), []).append(id(node))
        found: set[int] = set()
        waiting = [id(node) for node in nodes if exact_values(node)]
        while waiting:
            place = waiting.pop()
            if place not in found:
                found.add(place)
                waiting += above.get(place, ())
        return found

    def needs_rules(self, node: Node) -> bool:
        return id(node) in self.exact_nodes and self.can_write(node)

    def can_write(self, node: Node) -> bool:
        """Return whether rules can express everything in the node."""
        assert isinstance(node, dict)
        if node.keys() in ({"anyOf"}, {"$ref"}):
            return True
        if node.keys() == {"allOf"}:
            return len(node["allOf"]) == 1
        asked = node.keys() - {"type"}
        if "const" in asked or "enum" in asked:
            values = node.get("enum", [node.get("const")])
            # `holds` applies the bounds, and the other keywords do not apply to numbers.
            if all(isinstance(it, Decimal) for it in values):
                return not asked & {"anyOf", "oneOf", "allOf", "$ref"}
            return asked <= {"const", "enum", *NUMERIC, "minLength", "maxLength"}
        types = node.get("type", TYPES)
        if asked & {*_IN_PLACE, "patternProperties", "minProperties", "maxProperties"}:
            return False
        below_object = [*node.get("properties", {}).values(), node.get("additionalProperties")]
        has_numbers = bool(exact_values(node)) and {"integer", "number"} & set(types)
        if has_numbers and self._numbers(node) is None:
            return False
        return "object" in types or not any(id(it) in self.exact_nodes for it in below_object)

    def write(self, start: str) -> Grammars:
        """Return the grammars for a start rule, and the rules of all definitions that it needs."""
        while self._waiting:
            name = self._waiting.pop()
            self._lines.append(f"ref_{name}: {self.rule(self._schema.definitions[name])}")
        tokens = (f"STRING: /{_STRING}/", r"SPACE: / |\n {0,12}/", "ws: SPACE?")
        lines = [f"start: {start}", *self._lines, *tokens]
        return [{"name": self._name, "lark_grammar": "\n".join(lines)}, *self._parts]

    def rule(self, node: Node) -> str:
        """Return the text that stands for a node in other rules, such as a rule's name.

        Each node is written only once.
        """
        rule = self._rules.get(id(node))
        if rule is None:
            rule = self._rules[id(node)] = self._written(node)
        return rule

    def _written(self, node: Node) -> str:
        if isinstance(node, bool) or not self.needs_rules(node):
            return self._part(node)
        if "$ref" in node:
            return self._definition(node["$ref"])
        for name in ("anyOf", "allOf"):
            if name in node:
                return self._either([self.rule(it) for it in node[name] if it is not False])
        if "const" in node or "enum" in node:
            values = node.get("enum", [node.get("const")])
            if "const" in node and "enum" in node:
                values = [it for it in values if it == node["const"]]
            return self._one_of([it for it in values if holds(node, it)])
        return self._either(self._by_type(node))

    def _by_type(self, node: dict[str, Any]) -> list[str]:
        types = list(node.get("type", TYPES))
        found: list[str] = []
        others = [it for it in types if it not in ("integer", "number")]
        if others != types and exact_values(node) and (numbers := self._numbers(node)):
            types = others
            found.append(numbers)
        inside = (*node.get("properties", {}).values(), node.get("additionalProperties"))
        if "object" in types and any(id(it) in self.exact_nodes for it in inside):
            types.remove("object")
            found.append(self._object(node))
        items = (*node.get("prefixItems", ()), node.get("items"))
        if "array" in types and any(id(it) in self.exact_nodes for it in items):
            types.remove("array")
            found.append(self._array(node))
        if types:
            names: tuple[str, ...] = _OF_STRINGS if "string" in types else ()
            names += _OF_OBJECTS if "object" in types else ()
            names += _OF_ARRAYS if "array" in types else ()
            names += NUMERIC if {"integer", "number"} & set(types) else ()
            rest = {"type": types} | {name: node[name] for name in names if name in node}
            found.append(self._part(rest))
        return found

    def _numbers(self, node: dict[str, Any]) -> str | None:
        """Return a rule for a node's numbers.

        Returns None if no number fits, or if too many multiples fit.
        """
        is_integer = "number" not in node.get("type", TYPES)
        bounds = bounds_of(node)
        if "multipleOf" in node:
            found = multiples(bounds, node["multipleOf"], is_integer)
            return self._one_of(found) if found else None
        pattern = integer_pattern(bounds) if is_integer else number_pattern(bounds)
        return None if pattern is None else f"/{pattern}/"

    def _one_of(self, values: Sequence[Any]) -> str:
        """Return a rule for a list of values; all but arrays and objects become one pattern."""
        texts = [_text(it) for it in values if not isinstance(it, list | dict)]
        rules = [self._value(it) for it in values if isinstance(it, list | dict)]
        if texts:
            rules.append(pattern_of(texts))
        return self._either(rules)

    def _value(self, value: Any) -> str:
        if isinstance(value, list):
            return self.sequence('"["', [(self._value(it), True) for it in value], "", '"]"')
        if isinstance(value, dict):
            pairs = ((_quoted_key(name), self._value(it)) for name, it in value.items())
            return self.sequence('"{"', [(self._entry(*it), True) for it in pairs], "", '"}"')
        return _quoted(_text(value))

    def _object(self, node: dict[str, Any]) -> str:
        others = node.get("additionalProperties", True)
        required, listed = node.get("required", []), dict(node.get("properties", {}))
        listed |= {name: others for name in required if name not in listed}
        entries = [
            (self._entry(_quoted_key(name), self.rule(it)), name in required)
            for name, it in listed.items()
            if it is not False
        ]
        more = ""
        if others is not False:
            more = self._entry(self._other_keys(list(listed)), self.rule(others))
        return self.sequence('"{"', entries, more, '"}"')

    def _other_keys(self, taken: Sequence[str]) -> str:
        if not taken:
            return "STRING"
        names = " | ".join(map(_quoted_key, taken))
        self._lines.append(f"KEY{len(self._lines)}: /{_STRING}/ & ~({names})")
        return f"KEY{len(self._lines) - 1}"

    def _array(self, node: dict[str, Any]) -> str:
        first, others = node.get("prefixItems", []), node.get("items", True)
        least, most = node.get("minItems", 0), node.get("maxItems")
        entries = [(self.rule(it), i < least) for i, it in enumerate(first[:most])]
        if others is False or (most is not None and most <= len(first)):
            return self.sequence('"["', entries, "", '"]"', is_array=True)
        low = max(least - len(first), 0)
        high = "" if most is None else str(most - len(first))
        more = self.rule(others)
        return self.sequence('"["', entries, more, '"]"', (low, high), is_array=True)

    def _entry(self, key: str, value: str) -> str:
        return self.add(f'{key} ws ":" ws {value}')

    def sequence(
        self,
        opening: str,
        entries: Sequence[tuple[str, bool]],
        more: str,
        closing: str,
        times: tuple[int, str] = (0, ""),
        *,
        is_array: bool = False,
        comma: str = 'ws "," ws',
        space: str = "ws",
    ) -> str:
        """Return a rule for entries in a fixed order (some are optional), followed by additional
        entries.

        `more` is the rule of an additional entry. `times` is the minimum and the maximum number
        of additional entries.

        An entry has a comma in front only if another entry precedes it. So the rules are built
        from the last entry to the first entry, in two variants. `first` matches the remaining
        entries if no entry was written yet. `behind` matches the remaining entries after another
        entry, and so begins with a comma.

        In an array, no entry may follow an entry that was left out. `space` is the rule of the
        white space next to the brackets.
        """
        low, high = times
        behind = first = ""
        if more:
            behind = self.add(f"({comma} {more}){{{low},{high}}}")
            fewer = f"{{{max(low - 1, 0)},{int(high) - 1 if high else ''}}}"
            first = self.add(f"{more} ({comma} {more}){fewer}")
            first = first if low else f"{first}?"
        for entry, is_needed in reversed(entries):
            alone = f"{entry} {behind}"
            if is_needed:
                first, behind = alone, f"{comma} {alone}"
            elif is_array:
                first, behind = f"({alone})?", f"({comma} {alone})?"
            else:
                first, behind = f"({alone} | {first or _EMPTY})", f"({comma} {entry})? {behind}"
            first, behind = self.add(first), self.add(behind)
        first = f"{first} {space} " if first else ""
        return self.add(f"{opening} {space} {first}{closing}")

    def _definition(self, name: str) -> str:
        if name not in self._definitions:
            self._definitions.add(name)
            self._waiting.append(name)
        return f"ref_{name}"

    def _part(self, node: Node) -> str:
        name = f"{self._name}_{len(self._parts)}"
        # Each part repeats all definitions that the part needs, so the parts could take gigabytes
        # together. Beyond the limit no part is added, because the grammar will be refused for its
        # length.
        if self._num_written <= MAX_GRAMMAR:
            part = json_grammar(name, as_json_schema(self._schema, node))
            self._num_written += len(json.dumps(part))
            self._parts.append(part)
        return f"@{name}"

    def _either(self, options: list[str]) -> str:
        return options[0] if len(options) == 1 else self.add(" | ".join(options))

    def add(self, body: str) -> str:
        """Add a rule, and return its name."""
        self._lines.append(f"r{len(self._lines)}: {body}")
        return f"r{len(self._lines) - 1}"


def pattern_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches one of the texts.

    llguidance refuses a rule with thousands of alternatives, but accepts a pattern with thousands
    of alternatives.
    """
    pattern = "|".join(map(re.escape, texts)).replace("/", r"\/")
    return f"/({pattern})/"


def _text(value: Any) -> str:
    """Return the JSON of a value that is neither an array nor an object."""
    return text_of(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quoted_key(name: str) -> str:
    return _quoted(json.dumps(name, ensure_ascii=False))
