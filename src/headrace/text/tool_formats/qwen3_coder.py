"""Parses the calls of Qwen3-Coder: <function=name><parameter=key>value</parameter></function>."""

import re

from headrace.text.tool_formats.format import Call, StringTypes, ToolFormat
from headrace.text.tool_formats.values import value_of
from headrace.text.tool_formats.whole_calls import WholeCalls

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
# Models sometimes omit the end tag of a parameter.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=\n<parameter=)|(?=</function>\s*(?:$|<function=)))",
    re.DOTALL,
)
_END = re.compile(r"\s*</function>\s*")


def _parse(body: str, types: StringTypes) -> list[Call] | None:
    calls, at = [], 0
    while at < len(body):
        if not (function := _FUNCTION.match(body, at)):
            return None
        name, at = function[1].strip(), function.end()
        arguments = {}
        while parameter := _PARAMETER.match(body, at):
            key, at = parameter[1].strip(), parameter.end()
            arguments[key] = value_of(parameter[2], types(name, key))
        if not (end := _END.match(body, at)):
            return None
        calls.append((name, arguments))
        at = end.end()
    return calls


FORMAT = ToolFormat(
    ("<function=",),
    ("<tool_call>", "<function="),
    lambda types: WholeCalls(
        "</tool_call>", lambda body: _parse(body, types), ("<parameter=", "</parameter>")
    ),
    # Models often omit the tag <tool_call> before <function=.
    kept=("<function=",),
)
