"""Joins the contents of messages, and consecutive messages of the same role."""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

Message = dict[str, Any]
Content = str | list[Message]

_TEXTS = ("reasoning_content", "reasoning")


def merge_contents(contents: Iterable[Content], between: str = "\n\n") -> Content:
    """Join the contents that are not empty.

    The result is a text, or a list of parts if a content is a list.
    """
    filled = [content for content in contents if content]
    texts = [content for content in filled if isinstance(content, str)]
    if len(texts) == len(filled):
        return between.join(texts)
    parts: list[Message] = []
    for content in filled:
        if parts:
            parts.append(_text(between))
        parts += [_text(content)] if isinstance(content, str) else content
    return parts


def merge_turns(messages: Iterable[Message], between: str = "\n\n") -> list[Message]:
    """Join consecutive messages of the same role.

    Tool results are not joined, because each result belongs to its own call.
    """
    groups = [(role, list(group)) for role, group in groupby(messages, lambda it: it["role"])]
    merged = ([_merged(group, between)] if role != "tool" else group for role, group in groups)
    return list(chain.from_iterable(merged))


def _merged(group: Sequence[Message], between: str) -> Message:
    if len(group) == 1:
        return group[0]
    whole: Message = {}
    for message in reversed(group):
        # For a field that can have only one value, such as a name, the first message's value stays.
        whole |= message
    whole["content"] = merge_contents((message.get("content") or "" for message in group), between)
    for name in _TEXTS:
        if name in whole:
            whole[name] = merge_contents((message.get(name, "") for message in group), between)
    if "tool_calls" in whole:
        whole["tool_calls"] = [call for message in group for call in message.get("tool_calls", ())]
    return whole


def _text(text: str) -> Message:
    return {"type": "text", "text": text}
