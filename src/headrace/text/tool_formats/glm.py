"""Parses the tool calls of GLM: name<arg_key>key</arg_key><arg_value>value</arg_value>."""

import re

from headrace.text.tool_formats.format import Call, StringTypes, ToolFormat
from headrace.text.tool_formats.values import value_of
from headrace.text.tool_formats.whole_calls import WholeCalls

# Answers are parsed on the event loop, so no part of an answer may be matched twice. A lazy group
# that can be extended later would make the time cubic in the length of the answer.
_PAIR = re.compile(
    r"(?><arg_key>(.*?)</arg_key>)\s*+(?><arg_value>(.*?)</arg_value>)\s*+", re.DOTALL
)
_NAME = re.compile(r"[\w.-]{1,64}")


def _parse(body: str, types: StringTypes) -> list[Call] | None:
    head, opening, _ = body.partition("<arg_key>")
    name, at = head.strip(), len(head)
    arguments = {}
    while opening and (pair := _PAIR.match(body, at)):
        key, at = pair[1].strip(), pair.end()
        arguments[key] = value_of(pair[2], types(name, key))
    return [(name, arguments)] if at == len(body) and _NAME.fullmatch(name) else None


FORMAT = ToolFormat(
    ("<arg_key>",),
    ("<tool_call>",),
    lambda types: WholeCalls(
        "</tool_call>", lambda body: _parse(body, types), ("<arg_value>", "</arg_value>")
    ),
)
