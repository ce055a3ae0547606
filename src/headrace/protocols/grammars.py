"""A grammar for the form that a body asks for, compiled once so that it cannot fail later.

Runs where it may be killed: a schema may be made to take all memory.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.core.errors import RequestError
from headrace.fleet.served_model import ServedModel
from headrace.protocols.fields.structure import CallsWanted, Structure, Tool, Wanted
from headrace.text.grammar import GrammarCompiler, GrammarError
from headrace.text.harmony import answer_rules
from headrace.text.output_splitter import HARMONY, REASONING_TAGS
from headrace.text.tool_formats.table import format_of

MAX_GRAMMAR = 256 << 10
"""Characters: it is stored with the stream, and sent to the engine."""

SPACE = r"( |\n {0,12})?"
"""White space between the parts of a JSON text: enough to indent it, and an end to it."""

_MAX_TRIED = 1000  # schemas that are compiled one by one to find a fault
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]+)"')
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_DEFINITIONS = ("$defs", "definitions")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", *_LISTS[:3])
"""Keywords that may stand for properties which are not in the list."""
_VALUES = ("const", "default", "x-guidance")  # no schemas, though they look like some
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "dependentSchemas": ({},),
    "not": (False,),
}
"""Values that change nothing; other values of these keywords cannot be enforced."""

Grammars = list[dict[str, Any]]
"""Grammars as llguidance takes them; an answer begins in the first one."""

Constraint = tuple[str, tuple[int, int] | None]
"""A grammar and the tokens around reasoning, as Sampling has them."""


class _Part(NamedTuple):
    """A schema within a grammar, and where it stood in the body."""

    schema: dict[str, Any]
    path: str


class GrammarMaker:
    """Makes grammars for one model; made once, since it reads the whole vocabulary."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._compiler: GrammarCompiler | None = None
        self._why_not = ""
        try:
            spec = model.spec
            self._compiler = GrammarCompiler.load(model.folder, spec.vocab_size, spec.end_token_ids)
        except GrammarError as error:
            self._why_not = str(error)

    def make(self, structure: Structure) -> Constraint:
        """RequestError names what cannot be enforced, and where it stands."""
        if self._compiler is None:
            raise RequestError("unsupported_operation", self._why_not, structure.path)
        parts: list[_Part] = []
        is_harmony = self._model.reasoning_format == HARMONY
        tags = None if is_harmony else self._tags(structure)
        if is_harmony:
            grammars = self._in_harmony(structure, parts)
        elif structure.calls is not None:
            grammars = self._with_calls(structure.calls, structure.wanted, parts)
        else:
            assert structure.wanted
            grammars = [_body(structure.wanted, parts)]
        text = json.dumps({"grammars": grammars}, ensure_ascii=False)
        if len(text) > MAX_GRAMMAR:
            message = f"{structure.path} makes a grammar of {len(text)} characters; "
            message += f"it may have {MAX_GRAMMAR}."
            raise RequestError("invalid_value", message, structure.path)
        self._check(text, parts, structure.path)
        return text, tags

    def _with_calls(
        self, calls: CallsWanted, wanted: Wanted | None, parts: list[_Part]
    ) -> Grammars:
        name = self._model.tool_format
        make = format_of(name).rules if name else None
        if not name and wanted is not None:
            return [_body(wanted, parts)]  # the model is never shown its tools
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
        arguments = [self._arguments(i, tool, parts) for i, tool in enumerate(calls.tools)]
        body = [] if wanted is None else [_body(wanted, parts)]
        lines = "\n".join([start, *rules.lines])
        return [{"name": "calls", "lark_grammar": lines}, *arguments, *body]

    def _in_harmony(self, structure: Structure, parts: list[_Part]) -> Grammars:
        """All messages of an answer, those that reason among them."""
        calls, wanted = structure.calls, structure.wanted
        if not structure.is_message:  # the answer is text
            if wanted is None:
                raise _no_format(HARMONY, structure.path)
            return [_body(wanted, parts)]
        tools = calls.tools if calls else ()
        final = None if calls and calls.is_forced else "@body" if wanted else "TEXT?"
        names, token_id = [tool.name for tool in tools], self._model.tokenizer.token_id
        lines = answer_rules(names, final, structure.may_reason, token_id)
        if lines is None:
            message = f"This model's tokenizer lacks markers of harmony, so {structure.path} "
            message += "cannot be enforced; leave it out, or serve it with --reasoning-format none."
            raise RequestError("unsupported_operation", message, structure.path)
        arguments = [self._arguments(i, tool, parts) for i, tool in enumerate(tools)]
        body = [] if wanted is None else [_body(wanted, parts)]
        return [{"name": "answer", "lark_grammar": "\n".join(lines)}, *arguments, *body]

    def _arguments(self, number: int, tool: Tool, parts: list[_Part]) -> dict[str, Any]:
        """Strict tools as they are; of others, what can be enforced."""
        schema = tool.schema
        if not any(name in schema for name in ("type", "$ref", *_LISTS[:3])):
            schema = {"type": "object", **schema}
        if _lists_all(schema):
            schema = {**schema, "additionalProperties": False}  # nothing reads what is undeclared
        name = f"arguments{number}"
        grammar = _json(name, schema)
        if not tool.is_strict and self._fault([grammar]) is not None:
            lenient = _json(name, schema, lenient=True)
            if self._fault([lenient]) is None:
                return lenient
        parts.append(_Part(schema, tool.path))
        return grammar

    def _tags(self, structure: Structure) -> tuple[int, int] | None:
        """The ids of the tags of reasoning that may come before the grammar."""
        name = self._model.reasoning_format
        if not name or not structure.may_reason:
            return None
        ids = [self._model.tokenizer.token_id(tag) for tag in REASONING_TAGS[name]]
        match ids:
            case [int(opening), int(closing)]:
                return opening, closing
        message = f"This model's reasoning does not end in a single token, so {structure.path} "
        message += "cannot begin after it; send it with reasoning_effort none."
        raise RequestError("unsupported_operation", message, structure.path)

    def _check(self, text: str, parts: list[_Part], path: str) -> None:
        """Compiles everything; a fault is looked for where it can be named."""
        for part in parts:
            keyword = _silent(part)
            if keyword is not None:
                raise _unenforced(keyword)
        assert self._compiler
        try:
            self._compiler.check(text)
            return
        except GrammarError as error:
            fault = str(error).rstrip(".")
        for part in parts:
            own = self._fault([_json("own", part.schema)])
            if own is not None:
                raise _refusal(self._place(part, own), own)
        raise RequestError("invalid_value", f"{path} cannot be made a grammar: {fault}.", path)

    def _fault(self, grammars: Grammars) -> str | None:
        assert self._compiler
        try:
            self._compiler.compile(json.dumps({"grammars": grammars}))
        except GrammarError as error:
            return str(error).rstrip(".")
        return None

    def _place(self, part: _Part, fault: str) -> str:
        """The path of the innermost schema that has this fault by itself."""
        shared = {k: part.schema[k] for k in _DEFINITIONS if k in part.schema}
        num_tried = 0
        is_deeper = True
        while is_deeper:
            is_deeper = False
            for child in _children(part):
                num_tried += 1
                if num_tried > _MAX_TRIED:
                    return part.path
                if self._fault([_json("own", {**shared, **child.schema})]) == fault:
                    part, is_deeper = child, True
                    shared = {k: v for k, v in shared.items() if f".{k}." not in child.path}
                    break
        return part.path


def _body(wanted: Wanted, parts: list[_Part]) -> dict[str, Any]:
    """RequestError if the value cannot be read as its form."""
    if wanted.syntax == "json":
        parts.append(_Part(wanted.value, wanted.path))
        return _json("body", wanted.value)
    if wanted.syntax == "regex":
        rules = _regex(wanted.value)
    elif wanted.syntax == "choice":
        rules = "start: " + " | ".join(json.dumps(it, ensure_ascii=False) for it in wanted.value)
    else:
        rules = _rules(wanted)
    return {"name": "body", "lark_grammar": rules}


def _json(name: str, schema: dict[str, Any], lenient: bool = False) -> dict[str, Any]:
    """A grammar for one schema; options that the schema names itself are not taken."""
    options = {"whitespace_pattern": SPACE, "lenient": lenient}
    return {"name": name, "json_schema": {**_asking(schema), "x-guidance": options}}


def _lists_all(schema: dict[str, Any]) -> bool:
    """Whether a tool's parameters stand all in its list, as far as its author has said."""
    listed, needed = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not listed or not isinstance(needed, list):
        return False
    return set(map(str, needed)) <= listed.keys() and not any(name in schema for name in _OPEN)


def _asking(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without keywords that ask for nothing."""

    def inner(value: Any) -> Any:
        return _asking(value) if isinstance(value, dict) else value

    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            found[name] = {key: inner(item) for key, item in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [inner(item) for item in value]
        else:
            found[name] = value if name in _VALUES else inner(value)
    return {
        name: value for name, value in found.items() if value not in _ASKS_NOTHING.get(name, ())
    }


def _regex(pattern: str) -> str:
    from llguidance import LLMatcher

    grammar = json.loads(LLMatcher.grammar_from_regex(pattern))
    rule: str = grammar["grammars"][0]["lark_grammar"]
    return rule


def _rules(wanted: Wanted) -> str:
    """Lark as it is; GBNF, which writes `::=`, converted."""
    from llguidance.gbnf_to_lark import any_to_lark

    if "::=" not in wanted.value:
        rules: str = wanted.value
        return rules
    try:
        rules = any_to_lark(wanted.value)
    except Exception as error:  # the converter raises bare Exception
        reason = " ".join(str(error).split())[:120]
        message = f"{wanted.path} cannot be read as GBNF: {reason}."
        raise RequestError("invalid_value", message, wanted.path) from None
    return rules


def _children(part: _Part) -> Iterator[_Part]:
    """The schemas within a schema; definitions first, since what refers to them shares a fault."""
    for name, value in sorted(part.schema.items(), key=lambda item: item[0] not in _DEFINITIONS):
        path = f"{part.path}.{name}"
        if name in _MAPS and isinstance(value, dict):
            found = [(f"{path}.{key}", item) for key, item in value.items()]
        elif name in _LISTS and isinstance(value, list):
            found = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        else:
            found = [(path, value)]
        for place, item in found:
            if isinstance(item, dict) and name not in _VALUES:
                yield _Part(item, place)


class _Keyword(NamedTuple):
    name: str
    path: str


def _silent(part: _Part) -> _Keyword | None:
    """A keyword that compiles and yet may not hold: a key may be written twice."""
    level = [part]
    while level:
        for schema, path in level:
            least, required = schema.get("minProperties"), schema.get("required")
            num_sure = len(set(map(str, required))) if isinstance(required, list) else 0
            if isinstance(least, int | float) and least > max(1, num_sure):
                return _Keyword("minProperties", path)
        level = [child for it in level for child in _children(it)]
    return None


def _refusal(path: str, fault: str) -> RequestError:
    found = _UNIMPLEMENTED.match(fault)
    if found:
        return _unenforced(_Keyword(found[1], path))
    if fault.startswith("oneOf"):
        message = f"{path} has the keyword oneOf, whose schemas do not exclude each other by type "
        message += "or const; it cannot be enforced. Use anyOf."
        return RequestError("unsupported_parameter", message, path)
    message = f"{path} is no schema that an answer can follow: {fault}."
    return RequestError("invalid_value", message, path)


def _unenforced(keyword: _Keyword) -> RequestError:
    message = f"{keyword.path} has the keyword {keyword.name}, which cannot be enforced; "
    return RequestError("unsupported_parameter", message + "leave it out.", keyword.path)


def _no_format(name: str, path: str) -> RequestError:
    nowhere = "it has no chat template, or is served with --tool-format none"
    what = f"its tool format is {name}" if name else nowhere
    message = f"{path} cannot be enforced with this model: {what}. Leave it out"
    return RequestError("unsupported_parameter", f"{message}, or send tool_choice auto.", path)
