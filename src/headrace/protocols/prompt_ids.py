"""Turns prompts into token ids: renders chats, and tokenizes long texts in parts."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.protocols.worker_model import Bound
from headrace.text.broken_tokens import break_tokens
from headrace.text.known_pieces import Salt
from headrace.text.rendering import Rendered
from headrace.text.rendering import render as rendered
from headrace.text.text_model import TextModel
from headrace.text.tool_formats.generic import GENERIC, with_tools_as_text
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Ids, Infill, Prompt, Text

prompts_of = msgspec.msgpack.Decoder(tuple[Prompt, ...]).decode


class PromptIds(NamedTuple):
    """A prompt's token ids, how they were produced, and what was changed in a chat's messages.

    If the prompt is longer than allowed, the ids may be only a prefix.
    """

    token_ids: "array[int]"
    tokenization: str
    changes: tuple[str, ...] = ()


def ids_of(
    model: TextModel,
    prompt: Prompt,
    rendering: Bound,
    longest: int | None = None,
    salt: Salt | None = None,
) -> PromptIds:
    """Tokenize a prompt. Stop early once more than `longest` tokens are found.

    `rendering` bounds the time of a chat template. With a salt, the ids of a chat's pieces are
    cached for chats with the same salt.
    """
    match prompt:
        case Ids(token_ids):
            return PromptIds(array("i", token_ids), "given")
        case Text(text, adds_special_tokens):
            return PromptIds(*_text_ids(model, text, adds_special_tokens, longest))
        case Infill():
            return PromptIds(*_gap_ids(model, prompt, longest))
        case Chat():
            text, changes = render(model, prompt, rendering)
            return PromptIds(*_text_ids(model, text, False, longest, salt), changes)


def render(model: TextModel, chat: Chat, rendering: Bound) -> Rendered:
    """Render a chat. Raise RequestError if the model lacks a template or the template refuses."""
    if model.template is None:
        raise RequestError(
            "unsupported_operation",
            "This model has no chat template; "
            "use /v1/completions, or serve it with --chat-template.",
        )
    with rendering():
        if model.tool_format == GENERIC:
            chat = with_tools_as_text(chat)
        if model.broken_texts:
            chat = break_tokens(chat, model.broken_texts)
        return rendered(model.template, chat)


def _text_ids(
    model: TextModel,
    text: str,
    adds_special_tokens: bool,
    longest: int | None,
    salt: Salt | None = None,
) -> tuple["array[int]", str]:
    """Return the token ids of a text, and "streamed" if the text was encoded in several parts.

    For a text with one part, return "one-shot" instead. Stop early once more than `longest` ids
    are found.
    """
    encoding = model.encoder.begin(text, adds_special_tokens, longest, salt)
    num_parts = 1
    while encoding.advance():
        num_parts += 1
    return encoding.token_ids, "streamed" if num_parts > 1 else "one-shot"


def _gap_ids(model: TextModel, gap: Infill, longest: int | None) -> tuple["array[int]", str]:
    """Tokenize the texts before and after a gap, and join them with the model's infill marks."""
    tokenizer, ways = model.tokenizer, []

    def read(text: str) -> "array[int]":
        token_ids, way = _text_ids(model, text, False, longest)
        ways.append(way)
        return token_ids

    marks = tokenizer.infill_marks
    assert marks, "a prompt with a gap is accepted only if there are marks"
    before, behind = read(gap.before), read(gap.behind)
    ids = tokenizer.outer_ids[0][:] if gap.add_special_tokens else array("i")
    for mark, text in marks.files(gap.files):
        ids.extend([] if mark is None else [mark])
        ids += read(text)
    return ids + marks.joined(before, behind), max(ways)


def listed_tokens(model: TextModel, token_ids: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a `/tokenize` answer that list the tokens."""
    tokenizer, tokens = model.tokenizer, list[Any](token_ids)
    if fields.get("with_pieces"):
        tokens = [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in token_ids]
    listed = {"tokens": tokens, "count": len(token_ids)}
    if fields.get("return_token_strs"):
        listed["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
    return listed


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def put_images(packed: bytes, sizes: Sequence[int]) -> bytes:
    """Return a packed chat with its fetched images. `packed` is the chat followed by the images.

    `sizes` has the number of bytes of each image; 0 marks an image that the request contains.
    """
    first = len(packed) - sum(sizes)
    (chat,) = prompts_of(packed[:first])
    assert isinstance(chat, Chat)
    images = []
    for image, size in zip(chat.images, sizes, strict=True):
        images.append(packed[first : first + size] if size else image)
        first += size
    chat = msgspec.structs.replace(chat, images=tuple(images), addresses=())
    return msgspec.msgpack.encode((chat,))
