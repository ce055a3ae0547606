"""Compiles the structure that a body asks for into a grammar, and checks the grammar.

A malicious schema can exhaust memory, so this code runs in a worker that can be killed.

A part is one JSON Schema in the grammar. A fault is something in a part that cannot be
enforced. If a strict part has a fault, the request is refused with the fault's path. If a
lenient part has a fault, the fault is removed and the path is reported as ignored. The grammar
is compiled again after each removal. If too many faults remain, no lenient part is enforced.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.protocols.fields.structure import AnswerConstraint, CallConstraint, Structure, Tool
from headrace.text import json_schema, schema_rules
from headrace.text.argument_rules import ArgumentNotation, argument_grammars
from headrace.text.harmony import answer_rules
from headrace.text.json_schema import Node, ReadSchema, SchemaFinding
from headrace.text.output_splitter import HARMONY, REASONING_TAGS
from headrace.text.schema_limits import children, unsatisfied
from headrace.text.schema_rules import MAX_GRAMMAR, Grammars, grammars_of
from headrace.text.text_model import TextModel
from headrace.text.tool_formats.table import format_of
from headrace_common.errors import RequestError
from headrace_common.grammar import (
    COUNTED,
    OVERLAPPING,
    SAME_NAMES,
    UNSATISFIABLE,
    GrammarCompiler,
    GrammarError,
    pattern_fault,
)

# The maximum number of schemas that are compiled one by one to find a fault.
_MAX_TRIED = 1000
# The maximum number of faults that are removed one by one from a request's schemas.
_MAX_SOFTENED = 16
_OPEN = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas"),
)
"""Keywords that may declare properties outside `properties`."""
_BY_FAULT = {
    OVERLAPPING: ("oneOf",),
    SAME_NAMES: ("patternProperties",),
    COUNTED: ("minProperties", "maxProperties"),
}
_ANY_ARGUMENTS: dict[str, Any] = {"type": ["object"]}

Tags = tuple[int, int] | None


class MadeGrammar(NamedTuple):
    """A grammar, the ids of the tokens around reasoning, and the paths of what is not enforced."""

    grammar: str
    tags: Tags
    ignored: tuple[str, ...] = ()


NO_GRAMMAR = MadeGrammar("", None)


class _Part(NamedTuple):
    """A JSON Schema within a grammar. A lenient part loses keywords that cannot be enforced.

    `notation` is set if the schema describes a call's arguments that are not one JSON object.
    """

    name: str
    schema: ReadSchema
    path: str
    is_strict: bool
    notation: ArgumentNotation | None = None


class GrammarMaker:
    """Makes grammars for one model. Reuse the maker: the constructor reads the whole vocabulary."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._compiler: GrammarCompiler | None = None
        self._why_not = ""
        try:
            spec = model.spec
            self._compiler = GrammarCompiler.load(model.folder, spec.vocab_size, spec.end_token_ids)
        except GrammarError as error:
            self._why_not = str(error)

    def make(self, structure: Structure) -> MadeGrammar:
        """Make a grammar. Raise RequestError with the path of what cannot be enforced."""
        if self._compiler is None:
            raise RequestError("unsupported_operation", self._why_not, structure.path)
        parts: list[_Part] = []
        is_harmony = self._model.reasoning_format == HARMONY
        tags = None if is_harmony else self._tags(structure)
        if is_harmony:
            rules = self._in_harmony(structure, parts)
        elif structure.calls is not None:
            rules = self._with_calls(structure.calls, structure.wanted, parts)
        else:
            assert structure.wanted
            rules = _body(structure.wanted, parts)
        text = self._checked(rules, parts, structure.path)
        ignored = (it.path for part in parts for it in part.schema.findings)
        return MadeGrammar(text, tags, tuple(dict.fromkeys(ignored)))

    def _checked(self, rules: Grammars, parts: list[_Part], path: str) -> str:
        """Return a grammar that compiles, after removing the faults of lenient parts."""
        for _ in range(_MAX_SOFTENED):
            text = _text_of(rules, parts)
            if len(text) > MAX_GRAMMAR:
                self._shorten(parts, len(text), path)
                continue
            assert self._compiler
            try:
                self._compiler.check(text)
                return text
            except GrammarError as error:
                self._soften(parts, str(error), path)
        for part in parts:
            _stop_enforcing(part)
        return _text_of(rules, parts)

    def _soften(self, parts: list[_Part], fault: str, path: str) -> None:
        """Remove the fault from a lenient part. Raise RequestError for a fault in a strict part."""
        for part in parts:
            own = self._fault(part.schema, part.schema.root)
            if own is None:
                continue
            node = self._innermost(part, own)
            place = part.schema.paths.get(id(node), part.path)
            if part.is_strict:
                code = "invalid_value" if own == UNSATISFIABLE else "unsupported_parameter"
                names = _suspects(node, own)
                place = f"{place}.{names[0]}" if len(names) == 1 else place
                raise RequestError(code, _refusal(place, own), place)
            if not _relax(part, node, place, own):
                _stop_enforcing(part)
            return
        lenient = [part for part in parts if not part.is_strict]
        if not lenient or all(part.schema.root == _ANY_ARGUMENTS for part in lenient):
            raise RequestError("invalid_value", _refusal(path, fault), path)
        # Each part compiles alone, but the whole grammar exceeds a limit.
        for part in lenient:
            _stop_enforcing(part)

    def _shorten(self, parts: list[_Part], length: int, path: str) -> None:
        lenient = [it for it in parts if not it.is_strict and it.schema.root != _ANY_ARGUMENTS]
        if not lenient:
            message = f"{path} makes a grammar of {length} characters; the limit is {MAX_GRAMMAR}."
            raise RequestError("invalid_value", message, path)
        _stop_enforcing(max(lenient, key=lambda it: len(_text_of([], [it]))))

    def _with_calls(
        self, calls: CallConstraint, wanted: AnswerConstraint | None, parts: list[_Part]
    ) -> Grammars:
        name = self._model.tool_format
        make = format_of(name).rules if name else None
        if not name and wanted is not None:
            # A model without a tool format does not see the tools, so the model cannot call them.
            return _body(wanted, parts)
        if make is None:
            raise _no_format(name, calls.path)
        names = [tool.name for tool in calls.tools]
        rules = make(names, calls.most, self._model.tokenizer.token_id)
        if calls.is_forced:
            start = "start: calls"
        elif wanted is not None:
            start = "start: calls | @body"
        elif rules.text is None:
            raise _no_format(name, calls.path)
        else:
            start = f"start: {rules.start}\nTEXT: {rules.text}"
        body = _with_parts(calls.tools, wanted, parts, rules.notation)
        lines = "\n".join([start, *rules.lines])
        return [{"name": "calls", "lark_grammar": lines}, *body]

    def _in_harmony(self, structure: Structure, parts: list[_Part]) -> Grammars:
        """Return the grammars of all messages in a harmony answer, including the reasoning."""
        calls, wanted = structure.calls, structure.wanted
        # An answer that continues a message or text is plain text, without harmony messages.
        if not structure.is_message:
            if wanted is None:
                raise _no_format(HARMONY, structure.path)
            return _body(wanted, parts)
        tools = calls.tools if calls else ()
        final = None if calls and calls.is_forced else "@body" if wanted else "TEXT?"
        names, token_id = [tool.name for tool in tools], self._model.tokenizer.token_id
        lines = answer_rules(names, final, structure.may_reason, token_id)
        if lines is None:
            message = f"This model's tokenizer lacks markers of harmony, so {structure.path} "
            message += f"cannot be enforced. Leave out {structure.path}, or serve the model with "
            message += "--reasoning-format none."
            raise RequestError("unsupported_operation", message, structure.path)
        body = _with_parts(tools, wanted, parts)
        return [{"name": "answer", "lark_grammar": "\n".join(lines)}, *body]

    def _tags(self, structure: Structure) -> Tags:
        """Return the token ids of the tags around the reasoning that may precede the answer."""
        name = self._model.reasoning_format
        if not name or not structure.may_reason:
            return None
        ids = [self._model.tokenizer.token_id(tag) for tag in REASONING_TAGS[name]]
        match ids:
            case [int(opening), int(closing)]:
                return opening, closing
        message = f"This model's reasoning does not end in a single token, so {structure.path} "
        message += "cannot begin after the reasoning; send reasoning_effort none."
        raise RequestError("unsupported_operation", message, structure.path)

    def _fault(self, schema: ReadSchema, node: Node) -> str | None:
        assert self._compiler
        own = grammars_of(schema._replace(root=node), "own")
        try:
            self._compiler.check(json.dumps({"grammars": own}))
        except GrammarError as error:
            return str(error)
        return None

    def _innermost(self, part: _Part, fault: str) -> Node:
        """Return the innermost schema that has this fault when the schema is compiled alone."""
        node, num_tried, seen = part.schema.root, 0, set[str]()
        while True:
            below = children(node)
            if isinstance(node, dict) and node.get("$ref", "") not in {"", *seen}:
                seen.add(node["$ref"])
                below.append(part.schema.definitions[node["$ref"]])
            for child in below:
                num_tried += 1
                if num_tried > _MAX_TRIED:
                    return node
                if child is not False and self._fault(part.schema, child) == fault:
                    node = child
                    break
            else:
                return node


def _with_parts(
    tools: Sequence[Tool],
    wanted: AnswerConstraint | None,
    parts: list[_Part],
    notation: ArgumentNotation | None = None,
) -> Grammars:
    """Return the grammars of the answer's text; add each tool's schema to `parts`."""
    for number, tool in enumerate(tools):
        schema = tool.schema
        if not any(name in schema for name in ("type", "$ref", "anyOf", "oneOf", "allOf")):
            schema = {"type": "object", **schema}
        if _lists_all(schema):
            # The schema lists every argument that the tool reads, so allow no other arguments.
            schema = {**schema, "additionalProperties": False}
        part = _part(f"arguments{number}", schema, tool.path, tool.is_strict)
        parts.append(part._replace(notation=notation))
    return [] if wanted is None else _body(wanted, parts)


def _body(wanted: AnswerConstraint, parts: list[_Part]) -> Grammars:
    """Return the grammar of a constraint; a JSON Schema is added to `parts` instead.

    Raise RequestError if the value is not valid in its syntax.
    """
    if wanted.syntax == "json":
        parts.append(_part("body", wanted.value, wanted.path, wanted.is_strict))
        return []
    if wanted.syntax == "regex":
        rules = _regex(wanted)
    elif wanted.syntax == "choice":
        rules = "start: " + " | ".join(json.dumps(it, ensure_ascii=False) for it in wanted.value)
    else:
        rules = _rules(wanted)
    return [{"name": "body", "lark_grammar": rules}]


def _part(name: str, value: Any, path: str, is_strict: bool) -> _Part:
    """Read a schema, and record what cannot be enforced.

    Raise RequestError if the schema is strict and something in it cannot be enforced.
    """
    schema = json_schema.read(value, path, pattern_fault)
    part = _Part(name, schema, path, is_strict)
    dead = unsatisfied(schema)
    if dead is not None:
        schema.findings.append(SchemaFinding(dead or path, f"{dead or path} {UNSATISFIABLE}."))
    else:
        schema.findings.extend(schema_rules.settle(schema))
    refused = next((it for it in schema.findings if it.is_refused), None)
    if is_strict and refused is not None:
        code = "invalid_value" if dead == refused.path else "unsupported_parameter"
        raise RequestError(code, refused.message, refused.path)
    return part if dead is None else _stop_enforcing(part)


def _text_of(rules: Grammars, parts: Sequence[_Part]) -> str:
    """Write a grammar as text. An answer starts in the first grammar of the list."""
    written = [it for part in parts for it in _grammars(part)]
    return json.dumps({"grammars": [*rules, *written]}, ensure_ascii=False)


def _grammars(part: _Part) -> Grammars:
    if part.notation is not None:
        return argument_grammars(part.schema, part.name, part.notation)
    return grammars_of(part.schema, part.name)


def _refusal(path: str, fault: str) -> str:
    if fault == UNSATISFIABLE:
        return f"{path} {fault}."
    return f"{path} cannot be enforced: it {fault}."


def _suspects(node: Node, fault: str) -> list[str]:
    """Return the keywords in a node that can cause the fault."""
    if isinstance(node, bool) or fault == UNSATISFIABLE:
        return []
    known = [name for name in _BY_FAULT.get(fault, ()) if name in node]
    return known or [name for name in node if name != "type"]


def _relax(part: _Part, node: Node, path: str, fault: str) -> bool:
    """Remove the keywords that can cause the fault; return whether the node had such keywords."""
    names = _suspects(node, fault)
    for name in names:
        assert isinstance(node, dict)
        value = node.pop(name)
        if name == "oneOf" and "anyOf" not in node and names == ["oneOf"]:
            node["anyOf"] = value
        place = f"{path}.{name}"
        part.schema.findings.append(SchemaFinding(place, _refusal(place, fault)))
    return bool(names)


def _stop_enforcing(part: _Part) -> _Part:
    """Stop enforcing the part: allow any arguments, or any value."""
    root = part.schema.root
    if isinstance(root, dict):
        root.clear()
        if part.name != "body":
            root.update(_ANY_ARGUMENTS)
    part.schema.findings.append(SchemaFinding(part.path, f"{part.path} is not enforced."))
    return part


def _lists_all(schema: dict[str, Any]) -> bool:
    """Whether `properties` seems to list every parameter of a tool."""
    listed, needed = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not listed or not isinstance(needed, list):
        return False
    return set(map(str, needed)) <= listed.keys() and not any(name in schema for name in _OPEN)


def _regex(wanted: AnswerConstraint) -> str:
    from llguidance import LLMatcher

    if fault := pattern_fault(wanted.value):
        message = f"{wanted.path} cannot be enforced: it {fault}."
        raise RequestError("invalid_value", message, wanted.path)
    grammar = json.loads(LLMatcher.grammar_from_regex(wanted.value))
    rule: str = grammar["grammars"][0]["lark_grammar"]
    return rule


def _rules(wanted: AnswerConstraint) -> str:
    """Return Lark grammars unchanged; convert GBNF grammars, which contain `::=`."""
    from llguidance.gbnf_to_lark import any_to_lark

    if "::=" not in wanted.value:
        rules: str = wanted.value
        return rules
    try:
        rules = any_to_lark(wanted.value)
    # The converter raises Exception itself, not a subclass.
    except Exception:
        message = f"{wanted.path} cannot be read as GBNF. Check its rules, quotes and brackets."
        raise RequestError("invalid_value", message, wanted.path) from None
    return rules


def _no_format(name: str, path: str) -> RequestError:
    nowhere = "the model has no chat template, or is served with --tool-format none"
    what = f"the model's tool format is {name}" if name else nowhere
    message = f"{path} cannot be enforced with this model: {what}. Leave out {path}"
    return RequestError("unsupported_parameter", f"{message}, or send tool_choice auto.", path)
