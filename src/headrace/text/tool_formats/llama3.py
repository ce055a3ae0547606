"""Parses the tool calls of Llama 3 and 4: JSON objects, sometimes after a tag."""

from collections.abc import Sequence

from headrace.text.tool_formats.format import CallRules, TokenId, ToolFormat, objects
from headrace.text.tool_formats.json_calls import OBJECT, JsonCalls

# Llama 4 writes an end, but not Llama 3.
_END = "<|python_end|>"


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    lines = ["calls: " + objects(names, "parameters")]
    return CallRules(lines, "calls | TEXT?", r"/[^{\[\s](?s:.*)/")


FORMAT = ToolFormat(
    ('"parameters"',),
    ("<|python_tag|>", "<|python_start|>"),
    lambda _: JsonCalls(OBJECT, ("}", "}", "]", _END)),
    leads="{[",
    ends=(_END,),
    rules=_rules,
)
