"""Parses the tool calls of LFM2 and some templates of Llama: [name(key=value), ...]."""

from collections.abc import Sequence

from headrace.text.tool_formats.format import CallRules, TokenId, ToolFormat, marker, more
from headrace.text.tool_formats.python_calls import NOTATION, PythonCalls, any_call

# Llama 4 sometimes writes its markers around the list, LFM2 always.
_LLAMA, _LLAMA_END = "<|python_start|>", "<|python_end|>"
_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_ENDS = (f"]{_LLAMA_END}", f"]{_LFM_END}", _LLAMA_END, _LFM_END, "]")


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    has_marker = token_id(_LFM) is not None
    opening, closing = (marker(it, token_id) if has_marker else "" for it in (_LFM, _LFM_END))
    lines = [
        f'calls: {opening} "[" call' + more('", " call', most) + f' "]" {closing}',
        f"call: {any_call(names)}",
    ]
    # Text that begins with a bracket would be read as calls.
    start = "TEXT? calls?" if has_marker else "calls | TEXT?"
    return CallRules(lines, start, r"/[^\[\s](?s:.*)/", NOTATION)


FORMAT = ToolFormat(
    # Templates of Llama 3.2 and 4 show this example. Llama 4's own template asks for JSON.
    ("<|tool_list_start|>", _LFM, "[func_name1("),
    (_LLAMA, _LFM),
    lambda types: PythonCalls(types, "[", _ENDS),
    leads="[",
    ends=(_LLAMA_END, _LFM_END),
    rules=_rules,
)
