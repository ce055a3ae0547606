"""Parses the tool calls of OLMo 3: a call such as name(key="text", other=[1]) on each line."""

from collections.abc import Sequence

from headrace.text.tool_formats.format import (
    ANY_TEXT,
    CallRules,
    TokenId,
    ToolFormat,
    marker,
    more,
)
from headrace.text.tool_formats.python_calls import NOTATION, PythonCalls, any_call

_START, _END = "<function_calls>", "</function_calls>"


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    opening, closing = marker(_START, token_id), marker(_END, token_id)
    lines = [
        f"calls: {opening} call" + more(r'"\n" call', most) + f" {closing}",
        f"call: {any_call(names)}",
    ]
    text = ANY_TEXT if opening.startswith("<[") else None
    return CallRules(lines, text=text, notation=NOTATION)


FORMAT = ToolFormat(
    (_START,),
    (_START,),
    lambda types: PythonCalls(types, "", (_END,)),
    ends=(_END,),
    rules=_rules,
)
