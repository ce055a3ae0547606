"""Reads a JSON Schema, and keeps only the keywords and values that a grammar can enforce.

The table _KEYWORDS decides about every keyword and value. A keyword or value that cannot be
enforced is left out of the result and recorded as a finding with its path. The caller then
refuses the schema or reports the finding.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

from headrace.text.number_patterns import MAX_DIGITS
from headrace.text.schema_references import SchemaTargets

Node = dict[str, Any] | bool
"""A schema that has only keywords of _KEYWORDS, with valid values; numbers are Decimals."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri"),
)
_INTEGER_FORMATS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
_NUMBER_FORMATS = ("float", "double", "decimal", "float32", "float64", "number", "integer")
_LARGEST = Decimal("1.7976931348623157E+308")
"""The largest double. Most JSON parsers read doubles, so a larger bound excludes nothing."""
_TOO_LARGE = Decimal(10**MAX_DIGITS)
"""A larger bound cannot be enforced, because a pattern cannot write out so many digits."""

MAX_COUNT = 1 << 17
"""Answers have fewer characters and items than this number, so a larger maximum excludes
nothing.
"""

# This exponent is far beyond any float, and small enough for Decimal's arithmetic.
_MAX_EXPONENT = 99_999
_MAX_SHOWN = 60
_IN_PLACE = ("anyOf", "oneOf", "allOf", "$ref", "if", "then", "else", "not", "dependentSchemas")

_ASKS_NOTHING: Mapping[str, Callable[[dict[str, Any], Any], bool]] = {
    "uniqueItems": lambda schema, value: value is False,
    "not": lambda schema, value: value is False,
    "if": lambda schema, value: not {"then", "else"} & schema.keys(),
    "then": lambda schema, value: "if" not in schema or value in (True, {}),
    "else": lambda schema, value: "if" not in schema or value in (True, {}),
    "contains": lambda schema, value: (
        schema.get("minContains") == 0 and "maxContains" not in schema
    ),
    "minContains": lambda schema, value: "contains" not in schema or value in (0, 1),
    "maxContains": lambda schema, value: "contains" not in schema,
    "dependentSchemas": lambda schema, value: value == {},
    "dependentRequired": lambda schema, value: value == {},
    "dependencies": lambda schema, value: value == {},
    "unevaluatedItems": lambda schema, value: value in (True, {}),
    "unevaluatedProperties": lambda schema, value: value in (True, {}),
    "$recursiveRef": lambda schema, value: False,
    "$dynamicRef": lambda schema, value: False,
}
"""Keywords that no grammar enforces; each function returns whether the keyword has no effect."""


class SchemaFinding(NamedTuple):
    """A keyword or value that was left out, with the reason.

    `is_refused` is false for a mere annotation, such as an unknown format.
    """

    path: str
    message: str
    is_refused: bool = True


class ReadSchema(NamedTuple):
    """The result of reading a schema. Each `$ref` is now the name of an entry of `definitions`."""

    root: Node
    definitions: dict[str, Node]
    paths: dict[int, str]  # path of each node, by the node's id()
    findings: list[SchemaFinding]


PatternFault = Callable[[str], str]
"""Returns why a pattern cannot be enforced, as the end of a sentence; "" for an enforceable
pattern.
"""


def read(schema: Any, path: str, pattern_fault: PatternFault) -> ReadSchema:
    """Read the schema at `path` of a request body; skip definitions that nothing refers to."""
    reader = _SchemaReader(schema, path, pattern_fault)
    root = reader.node(schema, path)
    reader.read_definitions()
    return ReadSchema(root, reader.definitions, reader.paths, reader.findings)


class _SchemaReader:
    """Reads one schema, and collects its findings and definitions."""

    def __init__(self, schema: Any, path: str, pattern_fault: PatternFault) -> None:
        self.pattern_fault = cache(pattern_fault)
        self.findings: list[SchemaFinding] = []
        self.definitions: dict[str, Node] = {}
        self.paths: dict[int, str] = {}
        self.targets = SchemaTargets(schema, path)
        self._names: dict[int, str] = {}
        self._unread: list[tuple[str, Any, str]] = []

    def node(self, given: Any, path: str) -> Node:
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            self.find(path, f"{path} is {kind_of(given)}; a schema must be an object or a boolean.")
            return True
        node: dict[str, Any] = {}
        self.paths[id(node)] = path
        # Read `propertyNames` first, because this keyword decides where `additionalProperties` is
        # read.
        for name, value in sorted(given.items(), key=lambda item: item[0] != "propertyNames"):
            place = f"{path}.{name}"
            if name in _KEYWORDS:
                _KEYWORDS[name](_Keyword(self, node, given, name, value, place))
            elif name in _ASKS_NOTHING and not (
                _ASKS_NOTHING[name](given, value) or _close(node, given, name, value)
            ):
                self.unenforced(place, name)
        _merge(node)
        self._check_counts(node, path)
        return node

    def _check_counts(self, node: dict[str, Any], path: str) -> None:
        """Remove a `minProperties` that a grammar could only meet by writing a key twice."""
        least, num_sure = node.get("minProperties", 0), len(node.get("required", ()))
        if least <= num_sure:
            node.pop("minProperties", None)
        elif least > max(1, num_sure):
            self.unenforced(
                f"{path}.minProperties", "minProperties", " above the number of required properties"
            )
            del node["minProperties"]

    def read_definitions(self) -> None:
        while self._unread:
            name, given, path = self._unread.pop()
            self.definitions[name] = self.node(given, path)

    def refer(self, at: "_Keyword") -> str | None:
        """Return the name of the definition that a reference leads to, or None if the target is
        missing.
        """
        found = self.targets.find(at.value, at.given)
        if found is None:
            where = (
                "a part that this schema does not have"
                if at.value[:1] == "#"
                else "another document"
            )
            self.find(at.path, f"{at.path} refers to {where}: {shown(at.value)}.")
            return None
        return self.define(*found)

    def define(self, target: Any, path: str) -> str:
        """Return the name of the definition for this schema; each schema is read only once."""
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._unread.append((name, target, path))
        return name

    def find(self, path: str, message: str, is_refused: bool = True) -> None:
        self.findings.append(SchemaFinding(path, message, is_refused))

    def unenforced(self, path: str, name: str, why: str = "") -> None:
        self.find(path, f"{path} cannot be enforced{why}; leave the keyword {name} out.")


class _Keyword(NamedTuple):
    """One keyword of a schema that is being read into `node`."""

    reader: _SchemaReader
    node: dict[str, Any]
    given: dict[str, Any]
    name: str
    value: Any
    path: str

    def wrong(self, wanted: str) -> None:
        value = self.value
        is_shown = isinstance(value, str | int | float | Decimal) and not isinstance(value, bool)
        what = shown(value) if is_shown else kind_of(value)
        self.reader.find(self.path, f"{self.path} is {what}; it must be {wanted}.")

    def put(self, value: Any) -> None:
        self.node[self.name] = value


def _type(at: _Keyword) -> None:
    names = at.value if isinstance(at.value, list) else [at.value]
    if not names or not all(isinstance(it, str) and it in TYPES for it in names):
        at.wrong(f"one or several of {', '.join(TYPES)}")
        return
    at.put(list(dict.fromkeys(names)))


def _enum(at: _Keyword) -> None:
    if not isinstance(at.value, list):
        at.wrong("an array of values")
    elif not at.value:
        at.reader.find(at.path, f"{at.path} is empty, so no answer can satisfy it.")
    else:
        at.put([exact(it) for it in at.value])


def _const(at: _Keyword) -> None:
    at.put(exact(at.value))


def _schemas(at: _Keyword) -> None:
    if not isinstance(at.value, list) or (not at.value and at.name != "prefixItems"):
        at.wrong(
            "an array of schemas"
            if at.name == "prefixItems"
            else "an array with at least one schema"
        )
        return
    at.put([at.reader.node(it, f"{at.path}[{i}]") for i, it in enumerate(at.value)])


def _items(at: _Keyword) -> None:
    """Read `items`.

    In earlier drafts the value of `items` can be an array. The array becomes `prefixItems`, and
    `additionalItems` becomes `items`.
    """
    if not isinstance(at.value, list):
        at.put(at.reader.node(at.value, at.path))
        return
    at.node["prefixItems"] = [
        at.reader.node(it, f"{at.path}[{i}]") for i, it in enumerate(at.value)
    ]
    if "additionalItems" in at.given:
        path = at.path.removesuffix("items") + "additionalItems"
        at.node["items"] = at.reader.node(at.given["additionalItems"], path)


def _schema_map(at: _Keyword) -> None:
    if not isinstance(at.value, dict):
        at.wrong("an object of schemas")
        return
    found = {}
    for key, item in at.value.items():
        path = f"{at.path}.{key}"
        if at.name == "patternProperties" and (fault := at.reader.pattern_fault(key)):
            at.reader.find(path, f"{path} cannot be enforced: its pattern {fault}.")
        else:
            found[key] = at.reader.node(item, path)
    at.put(found)


def _required(at: _Keyword) -> None:
    if isinstance(at.value, list) and all(isinstance(it, str) for it in at.value):
        at.put(list(dict.fromkeys(at.value)))
    else:
        at.wrong("an array of names")


def _count(at: _Keyword) -> None:
    value = exact(at.value)
    if not isinstance(value, Decimal) or value < 0 or value != value.to_integral_value():
        at.wrong("a whole number of 0 or more")
    elif value <= MAX_COUNT:
        at.put(int(value))
    elif at.name.startswith("min"):
        at.reader.find(at.path, f"{at.path} is {shown(value)}; the limit is {MAX_COUNT}.")


def _number(at: _Keyword) -> None:
    value = exact(at.value)
    if isinstance(at.value, bool) and at.name.startswith("exclusive"):
        # In draft 4 and OpenAPI 3.0, `exclusiveMinimum: true` excludes the bound in `minimum`.
        value = exact(at.given.get(at.name.removeprefix("exclusive").lower()))
        if not at.value or not isinstance(value, Decimal):
            return
    if not isinstance(value, Decimal):
        at.wrong("a number")
    elif at.name == "multipleOf" and value <= 0:
        at.wrong("a number above 0")
    elif abs(value) >= _TOO_LARGE and (at.name == "multipleOf" or _is_low(at.name) == (value > 0)):
        at.reader.unenforced(at.path, at.name, f" beyond 1e{MAX_DIGITS}")
    elif at.name == "multipleOf" or abs(value) < _LARGEST:
        _tighten(at.node, at.name, value)


def _is_low(name: str) -> bool:
    return name in ("minimum", "exclusiveMinimum")


def _tighten(node: dict[str, Any], name: str, value: Decimal) -> None:
    """Set a bound; if the node already has this bound, the narrower bound stays."""
    choose = max if _is_low(name) else min
    node[name] = choose(node.get(name, value), value)


def _merge(node: dict[str, Any]) -> None:
    """Move an entry of `allOf` into the node if the entry contains only types and bounds."""
    kept = []
    for inner in node.get("allOf", ()):
        if not isinstance(inner, dict) or not inner.keys() <= {"type", *NUMERIC[:-1]}:
            kept.append(inner)
            continue
        for name, value in inner.items():
            if name == "type":
                node["type"] = _shared_types(node.get("type", list(TYPES)), value)
            else:
                _tighten(node, name, value)
    if "allOf" in node:
        node["allOf"] = kept
    if not node.get("allOf", True):
        del node["allOf"]


def _shared_types(own: list[str], other: list[str]) -> list[str]:
    def admits(types: list[str], name: str) -> bool:
        return name in types or (name == "integer" and "number" in types)

    return [it for it in TYPES if admits(own, it) and admits(other, it)]


def _pattern(at: _Keyword) -> None:
    if not isinstance(at.value, str):
        at.wrong("a string")
    elif fault := at.reader.pattern_fault(at.value):
        at.reader.find(at.path, f"{at.path} cannot be enforced: it {fault}.")
    else:
        at.put(at.value)


def _format(at: _Keyword) -> None:
    """Read a format; an unknown format is an annotation, as in JSON Schema."""
    if not isinstance(at.value, str):
        at.wrong("a string")
    elif at.value in FORMATS:
        at.put(at.value)
    elif at.value in _INTEGER_FORMATS and at.given.get("type") in ("integer", ["integer"]):
        low, high = _INTEGER_FORMATS[at.value]
        _tighten(at.node, "minimum", Decimal(low))
        _tighten(at.node, "maximum", Decimal(high))
    elif at.value not in _NUMBER_FORMATS and at.value not in _INTEGER_FORMATS:
        message = f"{at.path} is {shown(at.value)}, a format that is not enforced."
        at.reader.find(at.path, message, is_refused=False)


def _ref(at: _Keyword) -> None:
    if not isinstance(at.value, str):
        at.wrong("a string")
    elif (name := at.reader.refer(at)) is not None:
        at.put(name)


def _property_names(at: _Keyword) -> None:
    """Replace `propertyNames` by a list or a pattern, if nothing else restricts the names."""
    value = at.value
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        target = at.reader.targets.find(value["$ref"], at.given)
        value = target[0] if target else value
    named = value if isinstance(value, dict) else {}
    asked = named.keys() - {"title", "description", "$schema", "$comment", "default", "examples"}
    if value is True or (named.get("type", "string") == "string" and asked <= {"type"}):
        return
    if {"properties", "patternProperties"} & at.given.keys():
        at.reader.unenforced(at.path, at.name, " together with properties")
        return
    names = named.get("enum", [named["const"]] if "const" in named else None)
    if isinstance(names, list) and asked <= {"type", "enum", "const"}:
        at.node["properties"] = {it: _other_values(at) for it in names if isinstance(it, str)}
    elif (pattern := _pattern_of_names(named, asked)) and not at.reader.pattern_fault(pattern):
        at.node["patternProperties"] = {pattern: _other_values(at)}
    else:
        at.reader.unenforced(at.path, at.name)
        return
    at.node["additionalProperties"] = False


def _other_values(at: _Keyword) -> Node:
    """Return a reference to the schema of `additionalProperties`.

    With a copy for each name, the schema could grow exponentially with its depth.
    """
    below, path = at.given.get("additionalProperties", True), at.path.removesuffix(at.name)
    if not isinstance(below, dict):
        return at.reader.node(below, f"{path}additionalProperties")
    node: Node = {"$ref": at.reader.define(below, f"{path}additionalProperties")}
    at.reader.paths[id(node)] = f"{path}additionalProperties"
    return node


def _pattern_of_names(named: dict[str, Any], asked: set[str]) -> str | None:
    if named.get("type", "string") != "string":
        return None
    if asked <= {"type", "pattern"} and isinstance(named.get("pattern"), str):
        return str(named["pattern"])
    least, most = named.get("minLength", 0), named.get("maxLength", "")
    if asked <= {"type", "minLength", "maxLength"} and all(
        it == "" or (type(it) is int and 0 <= it <= MAX_COUNT) for it in (least, most)
    ):
        return f"^[^\\n]{{{least},{most}}}$"
    return None


def _additional_properties(at: _Keyword) -> None:
    # `propertyNames` may have set `additionalProperties` to False already.
    if at.node.get("additionalProperties") is not False:
        at.put(at.reader.node(at.value, at.path))


def _close(node: dict[str, Any], given: dict[str, Any], name: str, value: Any) -> bool:
    """Enforce a keyword `unevaluated…` that is false; return False if this is impossible.

    If no keyword such as `anyOf` applies another schema to the same value, the keyword means the
    same as `additionalProperties` or `items` with the value false.
    """
    if value is not False or any(it in given for it in _IN_PLACE):
        return False
    if name == "unevaluatedProperties":
        node.setdefault("additionalProperties", False)
    elif name == "unevaluatedItems":
        node.setdefault("items", False)
    else:
        return False
    return True


_KEYWORDS: Mapping[str, Callable[[_Keyword], None]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _schemas),
    "items": _items,
    **dict.fromkeys(("properties", "patternProperties"), _schema_map),
    "propertyNames": _property_names,
    "additionalProperties": _additional_properties,
    "required": _required,
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _count),
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(NUMERIC, _number),
    "pattern": _pattern,
    "format": _format,
    "$ref": _ref,
}


def exact_number(text: str) -> Decimal:
    """Parse a JSON number with all its digits; exponents are limited to _MAX_EXPONENT."""
    digits, _, exponent = text.lower().partition("e")
    nearest = max(-_MAX_EXPONENT, min(float(exponent or 0), _MAX_EXPONENT))
    return Decimal(f"{digits}e{nearest:.0f}")


def exact(value: Any) -> Any:
    """Return the value with all numbers as Decimals; a float gets the digits of its repr."""
    if isinstance(value, float):
        return Decimal(repr(value)) if value - value == 0 else None
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, list):
        return [exact(it) for it in value]
    if isinstance(value, dict):
        return {name: exact(it) for name, it in value.items()}
    return value


def shown(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names: dict[type, str] = {str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "a number")
