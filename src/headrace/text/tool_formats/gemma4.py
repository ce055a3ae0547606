"""Parses the tool calls of Gemma 4: call:name{key:<|"|>text<|"|>,other:[1,{inner:true}]}."""

import json
import re

from headrace.text.tool_formats.format import Call, IsText, ToolFormat
from headrace.text.tool_formats.whole_calls import WholeCalls

_START, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(r"\s*+call:\s*+([\w.-]{1,64})\s*+(?=\{)")
_PIECE = re.compile(
    rf"(?P<text>{re.escape(_QUOTE)}(?s:.*?){re.escape(_QUOTE)})"
    r'|(?P<json>"(?:[^"\\]|\\.)*+")'
    r"|(?P<mark>[{}\[\],:])"
    r"|(?P<space>\s++)"
    r'|(?P<word>[^{}\[\],:\s<"][^{}\[\],:<"]*+)'
)
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _parse(body: str, is_text: IsText) -> list[Call] | None:
    head = _HEAD.match(body)
    if head is None:
        return None
    written = _as_json(body[head.end() :])
    try:
        arguments = json.loads(written) if written else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    name = head[1]
    for key, value in arguments.items():
        # A model may omit the quotes of a text that looks like a number.
        if isinstance(value, int | float) and is_text(name, key):
            arguments[key] = json.dumps(value)
    return [(name, arguments)]


def _as_json(text: str) -> str | None:
    """Return the JSON for an object in Gemma's notation; None if the text is something else.

    Keys have no quotes. A special token is the quote before and after a text. Each character is
    read once.
    """
    found: list[str] = []
    at = 0
    while at < len(text):
        piece = _PIECE.match(text, at)
        if piece is None:
            return None
        at = piece.end()
        kind, written = str(piece.lastgroup), piece[0].strip()
        if kind == "text":
            found.append(_quoted(piece[0][len(_QUOTE) : -len(_QUOTE)]))
        elif kind == "word":
            written = _PYTHON.get(written, written)
            is_value = not text.startswith(":", at) and _LITERAL.fullmatch(written)
            found.append(written if is_value else _quoted(written))
        else:
            found.append(written)
    return "".join(found)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


FORMAT = ToolFormat(
    _START,
    (_START,),
    lambda is_text: WholeCalls(_END, lambda body: _parse(body, is_text)),
    ends=(_END, _QUOTE),
)
