"""Parses the tool calls of Hermes and Qwen: <tool_call> and a JSON object."""

from collections.abc import Sequence

from headrace.text.tool_formats.format import (
    ANY_TEXT,
    CallRules,
    TokenId,
    ToolFormat,
    marker,
    more,
    objects,
)
from headrace.text.tool_formats.json_calls import OBJECT, JsonCalls

_START, _END = "<tool_call>", "</tool_call>"


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    opening, closing = marker(_START, token_id), marker(_END, token_id)
    lines = [
        "calls: call" + more(r'"\n" call', most),
        rf'call: {opening} "\n" object "\n" {closing}',
        "object: " + objects(names, "arguments"),
    ]
    return CallRules(lines, text=ANY_TEXT if opening.startswith("<[") else None)


FORMAT = ToolFormat(
    (_START,),
    (_START,),
    lambda _: JsonCalls(OBJECT, ("}", "}", "]", "```", _END)),
    ends=(_END,),
    rules=_rules,
)
