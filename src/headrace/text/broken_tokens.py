"""Breaks special tokens in text from clients.

So only the chat template can insert special tokens.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from headrace.text.template import for_template
from headrace_common.request import Chat

ZERO_WIDTH_SPACE = "\u200b"


def break_tokens(chat: Chat, tokens: Sequence[str]) -> Chat:
    """Insert a zero-width space into all these tokens in the chat, after a token's first character.

    All texts that a client sends are searched: contents, names, calls, tools and template
    variables.
    """
    # Shorter tokens are broken first. This also breaks longer tokens that contain a shorter token.
    broken = [(it, it[0] + ZERO_WIDTH_SPACE + it[1:]) for it in sorted(tokens, key=len)]

    def written(text: str) -> str:
        for token, instead in broken:
            text = text.replace(token, instead)
        return text

    return msgspec.structs.replace(
        chat,
        messages=tuple(_each(_joined_parts(for_template(it)), written) for it in chat.messages),
        tools=tuple(_each(tool, written) for tool in chat.tools),
        template_kwargs=_each(chat.template_kwargs, written),
    )


def _each(value: Any, written: Callable[[str], str]) -> Any:
    """Return a copy in which all strings, including keys, are rewritten."""
    if isinstance(value, str):
        return written(value)
    if isinstance(value, dict):
        return {_each(key, written): _each(item, written) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each(item, written) for item in value]
    return value


def _joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Join consecutive text parts, because a special token may be split between two parts."""
    if not isinstance(message.get("content"), list):
        return message
    parts: list[Any] = []
    for is_text, run in groupby(message["content"], lambda part: part["type"] == "text"):
        if is_text:
            parts.append({"type": "text", "text": "".join(part["text"] for part in run)})
        else:
            parts += run
    return message | {"content": parts}
