"""Writes tools into the messages of a chat, for templates that do not support tools.

A text in the system message describes the tools and the format of a call: JSON on a separate
line. Earlier calls and their results become ordinary messages with roles that every template
supports.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.text.merging import Message, merge_contents, merge_turns
from headrace.text.tool_formats.format import (
    CallRules,
    TokenId,
    ToolFormat,
    more,
    objects,
)
from headrace.text.tool_formats.json_calls import OBJECT, JsonCalls
from headrace_common.request import Chat

GENERIC = "generic"
"""The tool format of models whose template does not support tools."""

_HEAD = "You can call the functions below, one JSON object per line:\n"
_TAIL = """
To call a function, answer with the call and nothing else: one JSON object on one line, such as
{"name": "the function's name", "arguments": {"parameter": "value"}}
Write each of several calls on its own line. The results come in the next message. If no function \
helps, answer in plain words."""


def with_tools_as_text(chat: Chat) -> Chat:
    """Write the chat's tools, calls and results as text.

    The description of the tools is appended to the system message. A chat without tools and calls
    is returned unchanged.
    """
    if not chat.tools and not has_calls(chat.messages):
        return chat
    messages = merge_turns(calls_as_text(chat.messages))
    if chat.tools:
        leads = messages[0]["role"] in ("system", "developer")
        system = messages[0]["content"] if leads else ""
        content = merge_contents([system, _described(chat.tools)])
        messages = [{"role": "system", "content": content}, *messages[leads:]]
    return msgspec.structs.replace(chat, messages=tuple(messages), tools=())


def has_calls(messages: Iterable[Message]) -> bool:
    """Return whether the messages include tool calls or tool results."""
    return any(it["role"] == "tool" or it.get("tool_calls") for it in messages)


def _described(tools: Sequence[dict[str, Any]]) -> str:
    keys = ("name", "description", "parameters")
    functions = [tool["function"] for tool in tools]
    lines = [{key: it[key] for key in keys if it.get(key) is not None} for it in functions]
    return _HEAD + "\n".join(json.dumps(it, ensure_ascii=False) for it in lines) + "\n" + _TAIL


def calls_as_text(messages: Iterable[Message]) -> Iterator[Message]:
    """Write calls in the format that the model is asked to use, and results as user messages."""
    # Function names, by the ids of the calls.
    names: dict[Any, str] = {}
    for message in messages:
        calls = [call for call in message.get("tool_calls", ()) if _is_call(call)]
        names |= {call.get("id"): call["function"]["name"] for call in calls}
        content = message.get("content") or ""
        kept = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id"), "the function")
            result = merge_contents([f"Result of {name}:", content], "\n")
            yield {"role": "user", "content": result}
        elif calls:
            yield kept | {"content": merge_contents([content, *map(_call, calls)], "\n")}
        else:
            yield kept


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _call(call: dict[str, Any]) -> str:
    """Write a call exactly as the model generated the call, so that the prefix cache matches."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'


def _rules(names: Sequence[str], most: int, token_id: TokenId) -> CallRules:
    lines = ["calls: call" + more(r'"\n" call', most), "call: " + objects(names, "arguments")]
    return CallRules(lines, "calls | TEXT?", r"/[^{\[`\s](?s:.*)/")


FORMAT = ToolFormat(
    (), (), lambda _: JsonCalls(OBJECT, ("}", "}", "]", "```")), leads="{[`", rules=_rules
)
