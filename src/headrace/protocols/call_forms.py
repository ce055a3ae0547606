"""Tool calls as rules of a grammar, in the forms in which models write them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.text.generic_tools import GENERIC

TokenId = Callable[[str], int | None]

_ANY_TEXT = "/(?s:.+)/"  # special tokens are no text, so it ends before a marker


class CallRules(NamedTuple):
    """Lark's `lines` define `calls`; @arguments0 is what the first tool takes, and so on.

    `start` is for an answer that may be text, of the form `text`, instead or before; None: the
    beginning of a call could not be told from text.
    """

    lines: list[str]
    start: str = "TEXT? calls?"
    text: str | None = _ANY_TEXT


def call_rules(form: str, names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    """The rules for one call or up to `most`; `form` is one of CALL_RULES."""
    return CALL_RULES[form](names, most, token_id)


def _hermes(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    opening, closing = (_marker(it, token_id) for it in ("<tool_call>", "</tool_call>"))
    lines = [
        "calls: call" + _more(r'"\n" call', most),
        rf'call: {opening} "\n" object "\n" {closing}',
        "object: " + _objects(names, "arguments"),
    ]
    return CallRules(lines, text=_ANY_TEXT if opening.startswith("<[") else None)


def _mistral(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    opening, between = _marker("[TOOL_CALLS]", token_id), token_id("[ARGS]")
    if between is not None:
        calls = [f'"{name}" <[{between}]> @arguments{i}' for i, name in enumerate(names)]
        lines = ["calls: call" + _more("call", most), f"call: {opening} ({' | '.join(calls)})"]
    else:
        lines = [
            f'calls: {opening} "[" object' + _more('", " object', most) + ' "]"',
            "object: " + _objects(names, "arguments"),
        ]
    return CallRules(lines, text=_ANY_TEXT if opening.startswith("<[") else None)


def _llama3(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    lines = ["calls: " + _objects(names, "parameters")]
    return CallRules(lines, "calls | TEXT?", r"/[^{\s](?s:.*)/")


def _generic(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    lines = ["calls: call" + _more(r'"\n" call', most), "call: " + _objects(names, "arguments")]
    return CallRules(lines, "calls | TEXT?", r"/[^{`\s](?s:.*)/")


CALL_RULES: Mapping[str, Callable[[Sequence[str], int, TokenId], CallRules]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "llama3": _llama3,
    GENERIC: _generic,
}
"""The rules by the names of tool formats."""


def _marker(text: str, token_id: TokenId) -> str:
    """The token itself, where the model has one."""
    found = token_id(text)
    return json.dumps(text) if found is None else f"<[{found}]>"


def _more(rule: str, most: int) -> str:
    return f" ({rule}){{0,{most - 1}}}" if most > 1 else ""


def _objects(names: Sequence[str], key: str) -> str:
    return " | ".join(
        f'{json.dumps(_opening(name, key))} @arguments{i} "}}"' for i, name in enumerate(names)
    )


def _opening(name: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": '
