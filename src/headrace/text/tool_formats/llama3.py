"""Parses the tool calls of Llama 3: JSON objects, sometimes after a tag."""

from collections.abc import Sequence

from headrace.text.tool_formats.format import CallRules, TokenId, ToolFormat, objects
from headrace.text.tool_formats.json_calls import OBJECT, JsonCalls


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    lines = ["calls: " + objects(names, "parameters")]
    return CallRules(lines, "calls | TEXT?", r"/[^{\[\s](?s:.*)/")


FORMAT = ToolFormat(
    ('"parameters"',),
    ("<|python_tag|>",),
    lambda _: JsonCalls(OBJECT, ("}", "}", "]")),
    leads="{[",
    rules=_rules,
)
