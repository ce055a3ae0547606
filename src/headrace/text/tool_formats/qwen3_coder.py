"""<function=name><parameter=key>value</parameter></function>, as Qwen3-Coder writes."""

import re

from headrace.text.tool_formats.format import Call, IsText, ToolFormat
from headrace.text.tool_formats.whole_calls import WholeCalls, value_of

_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)


def _parse(body: str, is_text: IsText) -> list[Call] | None:
    found = _FUNCTION.fullmatch(body)
    if not found:
        return None
    name = found[1].strip()
    pairs = _PARAMETER.findall(found[2])
    return [(name, {key: value_of(value, is_text(name, key)) for key, value in pairs})]


FORMAT = ToolFormat(
    "<function=",
    ("<tool_call>",),
    lambda is_text: WholeCalls("</tool_call>", lambda body: _parse(body, is_text)),
)
