"""Writes grammars for the arguments of calls, in formats whose arguments are not a JSON object."""

import json
import re
from typing import Any, NamedTuple

from headrace.text.json_schema import Node, ReadSchema
from headrace.text.schema_rules import Grammars, RuleWriter, pattern_of

_NAMING = {"type", "properties", "required", "additionalProperties"}
_ANY_STRING = {"type": ["string"]}
_NULL = {"type": ["null"]}
_BARE_NAME = re.compile(r"[\w.-]{1,64}")


class ArgumentNotation(NamedTuple):
    """How the arguments of a call are written.

    `opening`, `comma` and `closing` are Lark. `separator` is the text between a name and a value.
    `whole` is the rule if the schema does not list all names; `{}` in it stands for a JSON object.
    Values are JSON, with one exception: if the token `quote` is set, it encloses the strings of an
    enum, and strings whose length and pattern the schema does not limit. The schema may also allow
    null instead of the string.
    """

    opening: str
    separator: str
    comma: str
    closing: str
    whole: str
    quote: str | None = None


def argument_grammars(schema: ReadSchema, name: str, notation: ArgumentNotation) -> Grammars:
    """Return the grammars of a settled schema; the first grammar is called `name`."""
    rules = RuleWriter(schema, name)
    return rules.write(_start(rules, schema.root, notation))


def _start(rules: RuleWriter, root: Node, notation: ArgumentNotation) -> str:
    """Return a rule for the arguments: one by one if the schema names them all."""
    if not isinstance(root, dict) or not _names_all(root):
        return rules.add(notation.whole.format(rules.rule(root)))
    required = root.get("required", ())
    entries = []
    for name, node in root.get("properties", {}).items():
        if node is not False:
            value = _in_quotes(node, notation.quote) or rules.rule(node)
            entry = rules.add(f"{json.dumps(name + notation.separator)} {value}")
            entries.append((entry, name in required))
    opening, closing = notation.opening, notation.closing
    return rules.sequence(opening, entries, "", closing, comma=notation.comma, space="")


def _names_all(root: dict[str, Any]) -> bool:
    """Return whether the schema lists all arguments, by names that need no quotes."""
    if not root.keys() <= _NAMING or root.get("type") != ["object"]:
        return False
    listed = root.get("properties", {})
    others = root.get("additionalProperties", "properties" not in root)
    if others is not False and not listed:
        return False
    return listed.keys() >= set(root.get("required", ())) and all(map(_BARE_NAME.fullmatch, listed))


def _in_quotes(node: Node, quote: str | None) -> str | None:
    """Return a rule for a string in quotes that are tokens, or null; None for other values."""
    if quote is None or not isinstance(node, dict):
        return None
    if node == _ANY_STRING:
        return f"({quote} (/(?s:.+)/)? {quote})"
    options = node.get("anyOf", [{"type": [it]} for it in node.get("type", ())])
    if len(node) == 1 and len(options) > 1:
        rules = ['"null"' if it == _NULL else _in_quotes(it, quote) for it in options]
        return f"({' | '.join(map(str, rules))})" if all(rules) else None
    texts = node.get("enum", ())
    is_enum = texts and node.keys() <= {"type", "enum"}
    if is_enum and all(isinstance(it, str) and it for it in texts):
        return f"({quote} {pattern_of(texts)} {quote})"
    return None
