"""Parses the tool calls of Gemma 4: call:name{key:<|"|>text<|"|>,other:[1,{inner:true}]}."""

import json
import re
from collections.abc import Sequence

from headrace.text.argument_rules import ArgumentNotation
from headrace.text.tool_formats.format import (
    ANY_TEXT,
    Call,
    CallRules,
    StringTypes,
    TokenId,
    ToolFormat,
    marker,
    more,
)
from headrace.text.tool_formats.values import LITERAL, PYTHON_LITERALS, read_json, with_texts
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


def _parse(body: str, types: StringTypes) -> list[Call] | None:
    head = _HEAD.match(body)
    if head is None:
        return None
    written = _as_json(body[head.end() :])
    try:
        arguments = read_json(written) if written else None
    except (ValueError, RecursionError):
        return None
    return [with_texts(head[1], arguments, types)] if isinstance(arguments, dict) else None


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
            is_key = text.startswith(":", at)
            literal = PYTHON_LITERALS.get(written, written)
            is_literal = not is_key and LITERAL.fullmatch(literal)
            found.append(literal if is_literal else _quoted(written))
        else:
            found.append(written)
    return "".join(found)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    opening, closing = marker(_START, token_id), marker(_END, token_id)
    calls = (f"{json.dumps(f'call:{name}')} @arguments{i}" for i, name in enumerate(names))
    lines = [
        "calls: call" + more("call", most),
        f"call: {opening} ({' | '.join(calls)}) {closing}",
    ]
    # Without a token for the quote, strings are JSON, because a grammar could not find their ends.
    quote = None if token_id(_QUOTE) is None else marker(_QUOTE, token_id)
    notation = ArgumentNotation('"{"', ":", '","', '"}"', "{}", quote)
    text = ANY_TEXT if opening.startswith("<[") else None
    return CallRules(lines, text=text, notation=notation)


FORMAT = ToolFormat(
    (_START,),
    (_START,),
    lambda types: WholeCalls(_END, lambda body: _parse(body, types)),
    ends=(_END, _QUOTE),
    rules=_rules,
)
