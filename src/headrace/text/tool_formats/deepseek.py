"""Parses the tool calls of DeepSeek: special tags around a name and fenced JSON."""

from headrace.text.tool_formats.format import ToolFormat
from headrace.text.tool_formats.json_calls import JsonCalls

_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEP = "<｜tool▁sep｜>"
_DEEPSEEK = (
    rf"\s*{_CALL}(?:function{_SEP})?([\w.-]+)"
    rf"(?:{_SEP})?(?:\s*```json)?\s*(?=\{{)"
)

FORMAT = ToolFormat(
    ("tool▁calls▁begin",),
    (_CALLS, _CALL),
    lambda _: JsonCalls(_DEEPSEEK, ("```", _CALL_END, _CALLS_END), _CALL, has_header=True),
    ends=(_CALL_END, _CALLS_END, _SEP),
    kept=(_CALL,),
)
