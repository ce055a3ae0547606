"""Parses the tool calls of Phi-4-mini and Granite 3: <|tool_call|> and JSON objects or an array."""

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

_START, _END = "<|tool_call|>", "<|/tool_call|>"


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    opening = marker(_START, token_id)
    # Granite 3 writes no end marker, and has no token for it.
    closing = "" if token_id(_END) is None else marker(_END, token_id)
    lines = [
        f'calls: {opening} "[" object' + more('", " object', most) + f' "]" {closing}',
        "object: " + objects(names, "arguments"),
    ]
    return CallRules(lines, text=ANY_TEXT if opening.startswith("<[") else None)


FORMAT = ToolFormat(
    # Phi-4-mini shows tools to the model in this tag, and mentions no calls.
    (_START, "<|/tool|>"),
    (_START,),
    lambda _: JsonCalls(OBJECT, ("}", "}", "]", _END)),
    ends=(_END,),
    rules=_rules,
)
