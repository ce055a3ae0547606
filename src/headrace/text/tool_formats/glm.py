"""name<arg_key>key</arg_key><arg_value>value</arg_value>, as GLM writes."""

import re

from headrace.text.tool_formats.format import Call, IsText, ToolFormat
from headrace.text.tool_formats.whole_calls import WholeCalls, value_of

_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _parse(body: str, is_text: IsText) -> list[Call] | None:
    name = body.partition("<arg_key>")[0].strip()
    pairs = _PAIR.findall(body)
    if not re.fullmatch(r"[\w.-]{1,64}", name) or _PAIR.sub("", body).strip() != name:
        return None
    return [(name, {key.strip(): value_of(value, is_text(name, key)) for key, value in pairs})]


FORMAT = ToolFormat(
    "<arg_key>",
    ("<tool_call>",),
    lambda is_text: WholeCalls(
        "</tool_call>", lambda body: _parse(body, is_text), ("<arg_value>", "</arg_value>")
    ),
)
