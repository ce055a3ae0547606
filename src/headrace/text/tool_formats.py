"""How models write tool calls: one format a row, told by the words of the chat template.

A body reads what follows a start marker and gives the calls in it. Arguments that stand as JSON in
the text go out as they come; other formats are parsed call by call. What is no call is given back.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from headrace.text.generic_tools import GENERIC

Call = tuple[str, dict[str, Any]]
"""A name and its arguments."""

IsText = Callable[[str, str], bool]
"""Whether this tool declares this parameter as a string."""


class CallDelta(NamedTuple):
    """More of a tool call: its name comes first and once, then its arguments, piece by piece."""

    name: str
    arguments: str


class CallBody(Protocol):
    """Reads the calls behind one start marker."""

    def feed(self, text: str) -> list[CallDelta]: ...

    def flush(self) -> list[CallDelta]:
        """The answer has ended."""

    @property
    def rest(self) -> str | None:
        """The text after the calls, or all of it without a call; None while more may come."""


class ToolFormat(NamedTuple):
    """`starts` open a body; so does an answer that begins with one character of `leads`."""

    starts: tuple[str, ...]
    make: Callable[[IsText], CallBody]
    leads: str = ""
    ends: tuple[str, ...] = ()  # markers inside the body


class JsonCalls:
    """Calls whose arguments are a JSON object in the text: opening, arguments, closing; again."""

    def __init__(
        self, opening: str, closing: tuple[str, ...], again: str = "", has_header: bool = False
    ) -> None:
        """`opening` matches up to the arguments; its one group that matches is the name.

        `closing`: literals that may follow the arguments, in this order, white space between them.
        `again` begins another call. `has_header`: words may precede the first brace.
        """
        self._has_header = has_header
        self.rest: str | None = None
        self._opening = re.compile(opening)
        self._closing = closing
        self._again = again
        self._text = ""
        self._at = 0  # all before it was given out, or is of no more use
        self._has_name = False
        self._scan: _ObjectScan | None = None  # while in arguments

    def feed(self, text: str) -> list[CallDelta]:
        if self.rest is not None:
            self.rest += text
            return []
        self._text += text
        deltas: list[CallDelta] = []
        while self._advance(deltas, is_last=False):
            pass
        return deltas

    def flush(self) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while self.rest is None and self._advance(deltas, is_last=True):
            pass
        if self.rest is None:
            self.rest = ""
        return deltas

    def _advance(self, deltas: list[CallDelta], is_last: bool) -> bool:
        """Takes one part off the text; False if more of it is needed."""
        if self._scan is not None:
            return self._take_arguments(deltas)
        if self._has_name:
            return self._take_closing(is_last)
        return self._take_opening(deltas, is_last)

    def _take_opening(self, deltas: list[CallDelta], is_last: bool) -> bool:
        found = self._opening.match(self._text, self._at)
        if found:
            name = next(filter(None, found.groups()))
            deltas.append(CallDelta(json.loads(name) if name.startswith('"') else name, ""))
            self._at, self._has_name, self._scan = found.end(), True, _ObjectScan()
            return True
        whole = self._whole_object(is_last)
        if whole is None:
            return False
        call, end = whole
        if call is None:
            self.rest = self._text[self._at :]
            return False
        deltas += [CallDelta(call[0], ""), CallDelta("", call[1])]
        self._at, self._has_name = end, True
        return True

    def _whole_object(self, is_last: bool) -> tuple[tuple[str, str] | None, int] | None:
        """A call whose keys stand in another order; None while it is not whole."""
        start = self._text.find("{", self._at)
        header = self._text[self._at : start if start >= 0 else None].strip(" \n\r\t[,")
        if header and (start >= 0 or not self._has_header):
            return None, self._at
        if start < 0:
            return (None, self._at) if is_last else None
        scan = _ObjectScan()
        end = scan.feed(self._text, start)
        if not scan.is_over:
            return (None, self._at) if is_last else None
        try:
            value = json.loads(self._text[start:end])
        except ValueError:
            return None, self._at
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = value.get("name")
        if not isinstance(name, str) or not arguments.startswith("{"):
            return None, self._at
        return (name, arguments), end - 1  # its last brace is the first literal of the closing

    def _take_arguments(self, deltas: list[CallDelta]) -> bool:
        assert self._scan is not None
        end = self._scan.feed(self._text, self._at)
        if end > self._at:
            deltas.append(CallDelta("", self._text[self._at : end]))
            self._at = end
        if self._scan.is_over:
            self._scan = None
            return True
        return False

    def _take_closing(self, is_last: bool) -> bool:
        at = self._at
        for literal in self._closing:
            at = _skip_space(self._text, at)
            left = self._text[at : at + len(literal)]
            if left == literal:
                at += len(literal)
            elif literal.startswith(left) and not is_last:
                return False
        if not self._again:
            self.rest = self._text[at:]
            return False
        tail = self._text[at:].lstrip()
        if tail.startswith(self._again):
            self._at, self._has_name = at, False
            return True
        if not is_last and self._again.startswith(tail):
            return False
        self.rest = tail.removeprefix("]")
        return False


class WholeCalls:
    """Calls that are parsed once they are whole: up to `end`, or to the end of the answer."""

    def __init__(self, end: str, parse: Callable[[str], list[Call] | None]) -> None:
        self.rest: str | None = None
        self._end = end
        self._parse = parse
        self._text = ""

    def feed(self, text: str) -> list[CallDelta]:
        self._text += text
        if self.rest is not None or not self._end:
            return []
        body, end, rest = self._text.partition(self._end)
        return self._calls(body, end + rest, rest) if end else []

    def flush(self) -> list[CallDelta]:
        return self._calls(self._text, "", "") if self.rest is None else []

    def _calls(self, body: str, tail: str, rest: str) -> list[CallDelta]:
        calls = self._parse(body)
        if not calls:
            self.rest = body + tail
            return []
        self.rest = rest
        return [
            delta
            for name, arguments in calls
            for delta in (
                CallDelta(name, ""),
                CallDelta("", json.dumps(arguments, ensure_ascii=False)),
            )
        ]


class BareCalls:
    """Calls as bare JSON, a line each, which a model that was not trained on it may fence."""

    def __init__(self) -> None:
        self._calls = JsonCalls(_OBJECT, ("}", _FENCE), "{")
        self._head: str | None = ""  # until it is known whether there is a fence

    def feed(self, text: str) -> list[CallDelta]:
        if self._head is None:
            return self._calls.feed(text)
        self._head += text
        if f"{_FENCE}json".startswith(self._head.lstrip()):
            return []
        return self._begin()

    def flush(self) -> list[CallDelta]:
        begun = [] if self._head is None else self._begin()
        return begun + self._calls.flush()

    def _begin(self) -> list[CallDelta]:
        head, self._head = (self._head or "").lstrip(), None
        return self._calls.feed(head.removeprefix(_FENCE).removeprefix("json"))

    @property
    def rest(self) -> str | None:
        return self._calls.rest


class _ObjectScan:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str, start: int) -> int:
        """How far the object goes in `text`, counted from its beginning."""
        for place in range(start, len(text)):
            character = text[place]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return place + 1
        return len(text)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _xml(is_text: IsText) -> Callable[[str], list[Call] | None]:
    """<function=name><parameter=key>value</parameter></function>, as Qwen3-Coder writes."""

    def parse(body: str) -> list[Call] | None:
        found = _FUNCTION.fullmatch(body)
        if not found:
            return None
        name = found[1].strip()
        pairs = _PARAMETER.findall(found[2])
        return [(name, {key: _value(value, is_text(name, key)) for key, value in pairs})]

    return parse


def _pairs(is_text: IsText) -> Callable[[str], list[Call] | None]:
    """name<arg_key>key</arg_key><arg_value>value</arg_value>, as GLM writes."""

    def parse(body: str) -> list[Call] | None:
        name = body.partition("<arg_key>")[0].strip()
        pairs = _PAIR.findall(body)
        if not re.fullmatch(r"[\w.-]{1,64}", name) or _PAIR.sub("", body).strip() != name:
            return None
        return [(name, {key.strip(): _value(value, is_text(name, key)) for key, value in pairs})]

    return parse


def _pythonic(body: str) -> list[Call] | None:
    """[name(key=value), ...] in Python's literals, as Llama 4 and LFM2 write."""
    try:
        tree = ast.parse(body.removesuffix("<|python_end|>").strip(), mode="eval").body
        assert isinstance(tree, ast.List) and tree.elts
        return [_python_call(call) for call in tree.elts]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return None


def _python_call(call: ast.expr) -> Call:
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
    arguments = {}
    for keyword in call.keywords:
        assert keyword.arg
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(arguments)  # ValueError for sets and bytes would come later otherwise
    return call.func.id, arguments


def _value(text: str, is_text: bool) -> Any:
    if is_text:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


_NAME = r'"name"\s*:\s*("(?:[^"\\]|\\.)*")'
_ARGUMENTS = r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_OBJECT = rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?{_NAME}{_ARGUMENTS}'
_FENCE = "```"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEP = "<｜tool▁sep｜>"
_DEEPSEEK = (
    rf"\s*{_CALL}(?:function{_SEP})?([^<\s]+)"
    rf"(?:{_SEP})?(?:\s*```json)?\s*(?=\{{)"
)

FORMATS: Mapping[str, ToolFormat] = {
    "qwen3-coder": ToolFormat(
        ("<tool_call>",), lambda is_text: WholeCalls("</tool_call>", _xml(is_text))
    ),
    "glm": ToolFormat(
        ("<tool_call>",), lambda is_text: WholeCalls("</tool_call>", _pairs(is_text))
    ),
    "hermes": ToolFormat(
        ("<tool_call>",),
        lambda _: JsonCalls(_OBJECT, ("}", "</tool_call>")),
        ends=("</tool_call>",),
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        lambda _: JsonCalls(
            rf"\s*(?:[\[,]{_OBJECT}|([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{{))",
            ("}",),
            ",",
            has_header=True,
        ),
        ends=("[ARGS]", "[CALL_ID]"),
    ),
    "deepseek": ToolFormat(
        (_CALLS,),
        lambda _: JsonCalls(_DEEPSEEK, ("```", _CALL_END, _CALLS_END), _CALL, has_header=True),
        ends=(_CALL, _CALL_END, _CALLS_END, _SEP),
    ),
    "llama3": ToolFormat(
        ("<|python_tag|>",), lambda _: JsonCalls(_OBJECT, ("}", ";"), "{"), leads="{"
    ),
    GENERIC: ToolFormat((), lambda _: BareCalls(), leads="{`"),
    "pythonic": ToolFormat(("<|python_start|>",), lambda _: WholeCalls("", _pythonic), leads="["),
}
"""Formats by name, as --tool-format takes it. Harmony is more than one: see output_splitter.py."""

_SIGNS = (
    ("<function=", "qwen3-coder"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("tool▁calls▁begin", "deepseek"),
    ("<|python_start|>", "pythonic"),
    ('"parameters"', "llama3"),
)


def tool_format(template: str) -> str:
    """The format that a chat template speaks of; hermes, the commonest, if it takes tools.

    "" without a template.
    """
    if "tools" not in template:
        return GENERIC if template else ""
    return next((name for sign, name in _SIGNS if sign in template), "hermes")
