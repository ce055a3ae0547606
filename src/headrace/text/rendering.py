"""Renders conversations, including those that the template refuses or shows only in part.

Some templates have no system role, insist that user and assistant alternate, or skip a message
that they do not expect. Such a conversation is rewritten so that nothing is lost. A later turn does
not change how the earlier ones are rewritten, so the prefix cache keeps working.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import msgspec

from headrace.text.merging import merge_contents, merge_turns
from headrace.text.template import ChatTemplate, TemplateRefused
from headrace.text.tool_formats.generic import has_calls, in_words
from headrace_common.request import Chat

Message = dict[str, Any]

_SYSTEM = ("system", "developer")
_EMPTY = {"role": "user", "content": ""}


class Rendered(NamedTuple):
    """A prompt, and the changes made to the messages for it, in words for a header."""

    text: str
    changes: tuple[str, ...] = ()


class _Rewritten(NamedTuple):
    messages: Sequence[Message]
    changes: tuple[str, ...] = ()


def render(template: ChatTemplate, chat: Chat) -> Rendered:
    """Render the messages as they are, or in the first rewritten form that the template accepts.

    RequestError `template_failed` quotes the first refusal if the template accepts no form.
    """
    refusal: TemplateRefused | None = None
    for form in _forms(template, chat):
        try:
            text = template.render(msgspec.structs.replace(chat, messages=tuple(form.messages)))
            return Rendered(text, form.changes)
        except TemplateRefused as error:
            refusal = refusal or error
    assert refusal is not None, "there is at least one form"
    raise refusal


def _forms(template: ChatTemplate, chat: Chat) -> Iterator[_Rewritten]:
    """Yield the messages as they are, and then rewritten step by step."""
    form = _Rewritten(list(chat.messages))
    if not _loses_system(template, chat.messages):
        yield form
    for step in (_with_joined, _with_calls_in_words, _with_user_first, _with_user_last):
        if step is _with_user_last and not chat.add_generation_prompt:
            continue  # the last message is to be continued, or is the prompt's end
        rewritten = step(template, form)
        if rewritten.messages != form.messages:
            yield rewritten
        form = rewritten


def _loses_system(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    """Return whether the template would skip a system message, without refusing it."""
    places = [i for i, message in enumerate(messages) if _is_system(message)]
    if not places:
        return False
    loses_first = places[0] == 0 and template.shows_system is False
    return loses_first or (places[-1] > 0 and template.shows_later_system is False)


def _with_joined(template: ChatTemplate, form: _Rewritten) -> _Rewritten:
    """Turn system messages without a place into user messages; join consecutive equal roles."""
    heads = list(takewhile(_is_system, form.messages))
    rest = form.messages[len(heads) :]
    placed: list[Message] = []
    has_moved = False
    if content := merge_contents(head.get("content") or "" for head in heads):
        has_moved = not template.shows_system
        placed.append({"role": "user" if has_moved else "system", "content": content})
    for message in rest:
        moves = _is_system(message) and not template.shows_later_system
        has_moved |= moves
        placed.append(message | {"role": "user"} if moves else message)
    has_runs = any(a["role"] == b["role"] != "tool" for a, b in pairwise(form.messages))
    changes = ("system into user",) * has_moved + ("same role",) * has_runs
    return _Rewritten(merge_turns(placed), form.changes + changes)


def _with_calls_in_words(template: ChatTemplate, form: _Rewritten) -> _Rewritten:
    """Write tool calls as text, and their results as messages of the user."""
    if not has_calls(form.messages):
        return form
    return _Rewritten(merge_turns(in_words(form.messages)), (*form.changes, "tools into text"))


def _with_user_first(template: ChatTemplate, form: _Rewritten) -> _Rewritten:
    """Put an empty message of the user before an assistant's that begins the conversation."""
    place = int(_is_system(form.messages[0]))
    if form.messages[place:][:1] and form.messages[place]["role"] == "assistant":
        messages = [*form.messages[:place], _EMPTY, *form.messages[place:]]
        return _Rewritten(messages, (*form.changes, "empty user first"))
    return form


def _with_user_last(template: ChatTemplate, form: _Rewritten) -> _Rewritten:
    """Put an empty message of the user after an assistant's that ends the conversation."""
    if form.messages[-1]["role"] != "assistant":
        return form
    return _Rewritten([*form.messages, _EMPTY], (*form.changes, "empty user last"))


def _is_system(message: Message) -> bool:
    return message["role"] in _SYSTEM
