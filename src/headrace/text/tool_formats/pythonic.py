"""Parses the tool calls of Llama 4 and LFM2: [name(key=value), ...] with Python literals."""

import ast
import json
import re

from headrace.text.tool_formats.format import Call, StringTypes, ToolFormat
from headrace.text.tool_formats.values import with_texts
from headrace.text.tool_formats.whole_calls import WholeCalls


def _parse(body: str, types: StringTypes) -> list[Call] | None:
    try:
        tree = ast.parse(body.strip().removesuffix("<|python_end|>").strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [with_texts(*_call(call), types) for call in calls]
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
        return None


def _call(call: ast.expr) -> Call:
    assert isinstance(call, ast.Call) and not call.args
    name = ast.unparse(call.func)
    assert re.fullmatch(r"\w+(\.\w+)*", name)
    arguments = {}
    for keyword in call.keywords:
        assert keyword.arg
        arguments[keyword.arg] = ast.literal_eval(_InPython().visit(keyword.value))
    # Sets and bytes raise an error here, because JSON cannot represent these types.
    json.dumps(arguments, allow_nan=False)
    return name, arguments


class _InPython(ast.NodeTransformer):
    """Replaces JSON literals with Python literals."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


_WORDS = {"true": True, "false": False, "null": None}


FORMAT = ToolFormat(
    ("<|python_start|>",),
    ("<|python_start|>",),
    lambda types: WholeCalls("", lambda body: _parse(body, types)),
    leads="[",
)
