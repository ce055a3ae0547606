"""Joins the contents of messages, and consecutive messages of the same role."""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

Message = dict[str, Any]
Content = str | list[Message]

_TEXTS = ("reasoning_content", "reasoning")


def merge_contents(contents: Iterable[Content], between: str = "\n\n") -> Content:
    """Join texts, or the parts of contents with images; empty contents are left out."""
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
    """Join consecutive messages of one role, except results of tools: each belongs to its call."""
    runs = [(role, list(run)) for role, run in groupby(messages, lambda it: it["role"])]
    merged = ([_merged(run, between)] if role != "tool" else run for role, run in runs)
    return list(chain.from_iterable(merged))


def _merged(run: Sequence[Message], between: str) -> Message:
    if len(run) == 1:
        return run[0]
    whole: Message = {}
    for message in reversed(run):
        # Where a field can have only one value, such as a name, the first message's counts.
        whole |= message
    whole["content"] = merge_contents((message.get("content") or "" for message in run), between)
    for name in _TEXTS:
        if name in whole:
            whole[name] = merge_contents((message.get(name, "") for message in run), between)
    if "tool_calls" in whole:
        whole["tool_calls"] = [call for message in run for call in message.get("tool_calls", ())]
    return whole


def _text(text: str) -> Message:
    return {"type": "text", "text": text}
