"""Renders conversations, even if the template refuses them or would skip messages.

Some templates have no system role, insist that user and assistant alternate, or skip unexpected
messages. For these templates, a conversation is rewritten so that nothing is lost. Later messages
do not change how earlier messages are rewritten, so the prefix cache stays valid.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import msgspec

from headrace.text.merging import merge_contents, merge_turns
from headrace.text.template import ChatTemplate, TemplateRefused
from headrace.text.tool_formats.generic import calls_as_text, has_calls
from headrace_common.request import Chat

Message = dict[str, Any]

_SYSTEM = ("system", "developer")
_EMPTY = {"role": "user", "content": ""}


class Rendered(NamedTuple):
    """A prompt.

    `changes` describes the changes to the messages, as short texts for a response header.
    """

    text: str
    changes: tuple[str, ...] = ()


class _Rewritten(NamedTuple):
    messages: Sequence[Message]
    changes: tuple[str, ...] = ()


def render(template: ChatTemplate, chat: Chat) -> Rendered:
    """Render the messages unchanged, or in the first rewritten version that the template accepts.

    Raises RequestError `template_failed` with the first refusal if all versions are refused.
    """
    refusal: TemplateRefused | None = None
    for version in _versions(template, chat):
        try:
            text = template.render(msgspec.structs.replace(chat, messages=tuple(version.messages)))
            return Rendered(text, version.changes)
        except TemplateRefused as error:
            refusal = refusal or error
    assert refusal is not None, "there is at least one version"
    raise refusal


def _versions(template: ChatTemplate, chat: Chat) -> Iterator[_Rewritten]:
    """Yield the messages unchanged, then rewritten step by step."""
    version = _Rewritten(list(chat.messages))
    if not _loses_system(template, chat.messages):
        yield version
    for step in (_with_joined, _with_calls_as_text, _with_user_first, _with_user_last):
        if step is _with_user_last and not chat.add_generation_prompt:
            # No message may be added: the answer continues the last message, or the prompt ends
            # with the last message.
            continue
        rewritten = step(template, version)
        if rewritten.messages != version.messages:
            yield rewritten
        version = rewritten


def _loses_system(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    """Return whether the template would silently skip a system message."""
    places = [i for i, message in enumerate(messages) if _is_system(message)]
    if not places:
        return False
    loses_first = places[0] == 0 and template.shows_system is False
    return loses_first or (places[-1] > 0 and template.shows_later_system is False)


def _with_joined(template: ChatTemplate, version: _Rewritten) -> _Rewritten:
    """Turn system messages that the template skips into user messages.

    Also join consecutive messages of the same role.
    """
    heads = list(takewhile(_is_system, version.messages))
    rest = version.messages[len(heads) :]
    placed: list[Message] = []
    has_moved = False
    if content := merge_contents(head.get("content") or "" for head in heads):
        has_moved = not template.shows_system
        placed.append({"role": "user" if has_moved else "system", "content": content})
    for message in rest:
        moves = _is_system(message) and not template.shows_later_system
        has_moved |= moves
        placed.append(message | {"role": "user"} if moves else message)
    has_runs = any(a["role"] == b["role"] != "tool" for a, b in pairwise(version.messages))
    changes = ("system into user",) * has_moved + ("same role",) * has_runs
    return _Rewritten(merge_turns(placed), version.changes + changes)


def _with_calls_as_text(template: ChatTemplate, version: _Rewritten) -> _Rewritten:
    """Write tool calls as text, and tool results as user messages."""
    if not has_calls(version.messages):
        return version
    return _Rewritten(
        merge_turns(calls_as_text(version.messages)), (*version.changes, "tools into text")
    )


def _with_user_first(template: ChatTemplate, version: _Rewritten) -> _Rewritten:
    """Insert an empty user message before an assistant message that begins the conversation."""
    place = int(_is_system(version.messages[0]))
    if version.messages[place:][:1] and version.messages[place]["role"] == "assistant":
        messages = [*version.messages[:place], _EMPTY, *version.messages[place:]]
        return _Rewritten(messages, (*version.changes, "empty user first"))
    return version


def _with_user_last(template: ChatTemplate, version: _Rewritten) -> _Rewritten:
    """Append an empty user message if the conversation ends with an assistant message."""
    if version.messages[-1]["role"] != "assistant":
        return version
    return _Rewritten([*version.messages, _EMPTY], (*version.changes, "empty user last"))


def _is_system(message: Message) -> bool:
    return message["role"] in _SYSTEM
