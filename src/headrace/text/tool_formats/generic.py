"""Tools for a chat template that knows none: all about them is written into the messages.

A text before the conversation describes the tools and the form of a call, JSON on a line of its
own. Earlier calls and their results become text of the roles that every template knows.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.core.request import Chat
from headrace.text.tool_formats.format import (
    CallRules,
    TokenId,
    ToolFormat,
    more,
    objects,
)
from headrace.text.tool_formats.json_calls import OBJECT, JsonCalls

GENERIC = "generic"
"""The tool format of such models."""

_HEAD = "You can call functions. These there are, one JSON object a line:\n"
_TAIL = """
When a function helps, answer with its call and nothing else: one JSON object on one line,
{"name": "the function's name", "arguments": {"parameter": "value"}}
Several calls go on a line each. The results come in the next message. When no function helps, \
answer in plain words."""

_Message = dict[str, Any]
_Content = str | list[_Message]


def in_words(chat: Chat, shows_system: bool) -> Chat:
    """The chat without tools, calls and results; the same one if it had none.

    `shows_system`: the template has a place for the system's text; else it is the user's.
    """
    has_calls = any(it["role"] == "tool" or it.get("tool_calls") for it in chat.messages)
    if not chat.tools and not has_calls:
        return chat
    told = _described(chat.tools) if chat.tools else ""
    messages = _led(_alternating(_told(chat.messages)), told, shows_system)
    return msgspec.structs.replace(chat, messages=tuple(messages), tools=())


def _described(tools: Sequence[dict[str, Any]]) -> str:
    keys = ("name", "description", "parameters")
    functions = [tool["function"] for tool in tools]
    lines = [{key: it[key] for key in keys if it.get(key) is not None} for it in functions]
    return _HEAD + "\n".join(json.dumps(it, ensure_ascii=False) for it in lines) + "\n" + _TAIL


def _told(messages: Iterable[_Message]) -> Iterable[_Message]:
    """Each message in words: calls as the model would write them, results as the user's."""
    names: dict[Any, str] = {}  # of the functions, by the ids of their calls
    for message in messages:
        calls = [call for call in message.get("tool_calls", ()) if _is_call(call)]
        names |= {call.get("id"): call["function"]["name"] for call in calls}
        content = message.get("content") or ""
        kept = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id"), "the function")
            yield {"role": "user", "content": _joined(f"Result of {name}:", content, "\n")}
        elif calls:
            written = "\n".join(map(_call, calls))
            yield kept | {"content": _joined(content, written, "\n") if content else written}
        else:
            yield kept


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _call(call: dict[str, Any]) -> str:
    """Writes a call to the letter as it was generated, so that a client's copy of it is cached."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'


def _alternating(messages: Iterable[_Message]) -> list[_Message]:
    """Messages that follow one of the same role are joined to it: some templates want turns."""
    found: list[_Message] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"]:
            content = _joined(found[-1].get("content") or "", message.get("content") or "")
            found[-1] = found[-1] | {"content": content}
        else:
            found.append(message)
    return found


def _led(messages: list[_Message], text: str, shows_system: bool) -> list[_Message]:
    """Puts this text, which may be empty, after what the system says at the start."""
    num_heads = next(
        (i for i, it in enumerate(messages) if it["role"] not in ("system", "developer")),
        len(messages),
    )
    heads, rest = messages[:num_heads], messages[num_heads:]
    content: _Content = text
    for head in reversed(heads):
        content = _joined(head.get("content") or "", content)
    if not content:
        return messages
    if shows_system:
        return [{"role": "system", "content": content}, *rest]
    if rest and rest[0]["role"] == "user":
        content, rest = _joined(content, rest[0].get("content") or ""), rest[1:]
    return [{"role": "user", "content": content}, *rest]


def _joined(first: _Content, second: _Content, between: str = "\n\n") -> _Content:
    """Texts, or the parts of contents with images."""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second if first and second else first or second
    return [*_parts(first), {"type": "text", "text": between}, *_parts(second)]


def _parts(content: _Content) -> list[_Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    lines = ["calls: call" + more(r'"\n" call', most), "call: " + objects(names, "arguments")]
    return CallRules(lines, "calls | TEXT?", r"/[^{\[`\s](?s:.*)/")


FORMAT = ToolFormat(
    "", (), lambda _: JsonCalls(OBJECT, ("}", "}", "]", "```")), leads="{[`", rules=_rules
)
