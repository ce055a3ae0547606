"""Parses the tool calls of Mistral: [TOOL_CALLS] and a JSON array, or names with arguments."""

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

_START = "[TOOL_CALLS]"
_OPENING = rf"{OBJECT}|\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)"


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    opening, between = marker(_START, token_id), token_id("[ARGS]")
    if between is not None:
        calls = [f'"{name}" <[{between}]> @arguments{i}' for i, name in enumerate(names)]
        lines = ["calls: call" + more("call", most), f"call: {opening} ({' | '.join(calls)})"]
    else:
        lines = [
            f'calls: {opening} "[" object' + more('", " object', most) + ' "]"',
            "object: " + objects(names, "arguments"),
        ]
    return CallRules(lines, text=ANY_TEXT if opening.startswith("<[") else None)


FORMAT = ToolFormat(
    (_START,),
    (_START,),
    lambda _: JsonCalls(_OPENING, ("}", "}", "]"), has_header=True),
    ends=("[ARGS]", "[CALL_ID]"),
    rules=_rules,
)
