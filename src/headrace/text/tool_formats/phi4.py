"""Parses the tool calls of Phi-4-mini and Granite 3: <|tool_call|> and JSON objects or an array."""

from headrace.text.tool_formats.format import ToolFormat
from headrace.text.tool_formats.json_calls import OBJECT, JsonCalls

# Granite 3 writes no end marker.
_START, _END = "<|tool_call|>", "<|/tool_call|>"

FORMAT = ToolFormat(
    _START,
    (_START,),
    lambda _: JsonCalls(OBJECT, ("}", "}", "]", _END)),
    ends=(_END,),
)
