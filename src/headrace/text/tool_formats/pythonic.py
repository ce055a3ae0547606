"""[name(key=value), ...] in Python's literals, as Llama 4 and LFM2 write."""

import ast
import json

from headrace.text.tool_formats.format import Call, ToolFormat
from headrace.text.tool_formats.whole_calls import WholeCalls


def _parse(body: str) -> list[Call] | None:
    try:
        tree = ast.parse(body.removesuffix("<|python_end|>").strip(), mode="eval").body
        assert isinstance(tree, ast.List) and tree.elts
        return [_call(call) for call in tree.elts]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return None


def _call(call: ast.expr) -> Call:
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
    arguments = {}
    for keyword in call.keywords:
        assert keyword.arg
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(arguments)  # ValueError for sets and bytes would come later otherwise
    return call.func.id, arguments


FORMAT = ToolFormat(
    "<|python_start|>", ("<|python_start|>",), lambda _: WholeCalls("", _parse), leads="["
)
