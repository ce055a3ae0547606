"""Shortens the conversations of /v1/responses that do not fit into the model's context."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.messages import take_images, without_images
from headrace.protocols.openai.response_events import StoredBody, open_kept
from headrace.protocols.openai.response_history import (
    COMPACTION,
    Item,
    cut_points,
    dropped,
    runs_of,
    summary_item,
    visible,
)
from headrace.protocols.openai.response_items import (
    NO_MESSAGES,
    Message,
    item_id,
    listed,
    messages_of,
)
from headrace.protocols.prompt_ids import PromptIds, ids_of, render
from headrace.protocols.requests import stub_of
from headrace.protocols.worker_model import WorkerModel, WorkerModels
from headrace_common.request import Chat
from headrace_common.worker_jobs import (
    CheckedBody,
    Encoded,
    EncodedAhead,
    FitResponse,
    PutSummary,
    ShortenResponse,
    SummarizeResponse,
    WriteCompaction,
)

# The fields of a request that also apply to the request for a summary of its conversation.
_FOR_SUMMARY = (
    *("model", "alias", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("cache_prompt", "cache_salt", "priority", "parameter_types"),
)
_ASK = (
    "Summarize this conversation, so that another assistant can continue it without seeing it. "
    "Include the user's goals and constraints, decisions, facts, names, paths, commands and "
    "results that are still needed, what is done, and what is left to do. Do not call tools. Write "
    "only the summary."
)

_decode_checked = msgspec.msgpack.Decoder(CheckedBody).decode
_decode_prompts = msgspec.msgpack.Decoder(tuple[Chat]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_shown = msgspec.json.Decoder(dict[str, Any]).decode


def head_of(chat: Chat, items: Sequence[Item]) -> tuple[Message, ...]:
    """Return the messages that precede the items: the message made from `instructions`, if any."""
    return chat.messages[: len(chat.messages) - len(messages_of(items) or NO_MESSAGES)]


def do(job: ShortenResponse, body: bytes, models: WorkerModels) -> CheckedBody | bytes:
    """Return the result of a job. Raise RequestError if the job refuses `body`."""
    if isinstance(job, WriteCompaction):
        return compaction(job, body)
    checked = _decode_checked(body)
    if isinstance(job, FitResponse):
        return fit(job, checked, models)
    if isinstance(job, PutSummary):
        return put_summary(job, checked)
    return summarize(job, checked)


def _conversation(kept: StoredBody) -> list[Item]:
    """Return the items that led to a response, and the summary that replaced them, if any."""
    items = _decode_items(kept.items)
    return [*items, summary_item("", kept.summary)] if kept.summary else items


def fit(job: FitResponse, checked: CheckedBody, models: WorkerModels) -> CheckedBody:
    """Tokenize the chat of a request, and drop its oldest items if the chat does not fit.

    The stored items stay complete; the response object names the items that the model did not
    see. If even the shortest conversation does not fit, the request is returned unchanged, and
    admission refuses it.
    """
    text = models.asked(checked.fields)
    if text is None:
        # An unknown model is refused later.
        return checked
    kept, (chat,) = open_kept(checked.kept), _decode_prompts(checked.packed)
    items = _conversation(kept)
    head, points, seen = head_of(chat, items), cut_points(items), set(visible(items))
    images = _Images(chat, head + messages_of(items), text, models)
    found: dict[int, tuple[Chat, PromptIds]] = {}

    def fits(cut: int) -> bool:
        gone = set(dropped(items, cut))
        places = [place for place in range(len(items)) if place not in gone]
        messages = messages_of([items[place] for place in places], places=places) or NO_MESSAGES
        short = images.put_into(head + messages) if cut else chat
        found[cut] = short, ids_of(text.model, short, models.rendering, job.longest)
        num_tokens = len(found[cut][1].token_ids)
        return num_tokens <= job.room and num_tokens + images.num_tokens(short) <= job.room

    cut = _first_fitting(points, fits)
    if cut is None:
        return checked
    chat, (token_ids, way, changes) = found[cut]
    if not chat.images:
        text.check_placeholders(token_ids)
        encoded = Encoded((token_ids.tobytes(),), way, changes=changes)
        ahead = EncodedAhead(job.number, job.longest, encoded)
        checked = msgspec.structs.replace(checked, ahead=ahead)
    if cut == 0:
        return checked
    runs = runs_of(place for place in dropped(items, cut) if place in seen)
    shown = _decode_shown(kept.shown) | {"truncated_items": runs}
    kept = msgspec.structs.replace(kept, shown=encode(shown))
    return msgspec.structs.replace(
        checked,
        stubs=(stub_of(chat),),
        packed=msgspec.msgpack.encode((chat,)),
        kept=msgspec.msgpack.encode(kept),
    )


class _Images:
    """The images of a conversation, of which some items can be dropped."""

    def __init__(
        self, chat: Chat, messages: tuple[Message, ...], text: WorkerModel, models: WorkerModels
    ) -> None:
        """`messages` are those of the whole conversation; `chat` has their images."""
        self._chat, self._text, self._rendering = chat, text, models.rendering
        self._number_of = {path: i for i, (_, path) in enumerate(without_images(messages)[1])}
        self._counts: dict[bytes, int] = {}

    def put_into(self, messages: tuple[Message, ...]) -> Chat:
        """Return the chat with only these messages and their images."""
        chat = self._chat
        shown, found = without_images(messages)
        numbers = [self._number_of[path] for _, path in found]
        addresses = tuple(chat.addresses[number] for number in numbers) if chat.addresses else ()
        return msgspec.structs.replace(
            chat,
            messages=shown,
            images=tuple(chat.images[number] for number in numbers),
            image_params=tuple(chat.image_params[number] for number in numbers),
            addresses=addresses if any(addresses) else (),
        )

    def num_tokens(self, chat: Chat) -> int:
        """Return the number of tokens that the images add to the text of a chat."""
        pairs = zip(chat.images, chat.image_params, strict=True)
        return sum(self._num_tokens_of(image, param) for image, param in pairs)

    def _num_tokens_of(self, image: bytes, param: str) -> int:
        if (known := self._counts.get(image)) is not None:
            return known
        model = self._text.model
        alone = Chat(({"role": "user", "content": [{"type": "image"}]},))
        text = render(model, alone, self._rendering).text
        num_text = len(ids_of(model, alone, self._rendering).token_ids)
        num = self._text.image_processor.num_tokens(text, image, param) - num_text
        self._counts[image] = num
        return num


def summarize(job: SummarizeResponse, checked: CheckedBody) -> CheckedBody:
    """Return the request for a summary: the same prompt, so that its prefix is cached, and a
    final message that asks for the summary.

    If a summary could not replace any item, and the client did not ask for a summary, `stubs` of
    the result is empty.
    """
    items, (chat,) = _conversation(open_kept(checked.kept)), _decode_prompts(checked.packed)
    seen = set(visible(items))
    if not job.is_asked and not seen.intersection(dropped(items, len(items))):
        return msgspec.structs.replace(checked, stubs=())
    chat = msgspec.structs.replace(
        chat,
        messages=(*chat.messages, {"role": "user", "content": _ASK}),
        template_kwargs=chat.template_kwargs | {"enable_thinking": False},
    )
    fields = {name: checked.fields[name] for name in _FOR_SUMMARY if name in checked.fields}
    fields["max_tokens"] = job.max_tokens
    packed = msgspec.msgpack.encode((chat,))
    return CheckedBody(fields, (stub_of(chat),), packed)


def put_summary(job: PutSummary, checked: CheckedBody) -> CheckedBody:
    """Return the request with a prompt in which the summary replaces the items."""
    kept, (chat,) = open_kept(checked.kept), _decode_prompts(checked.packed)
    items = _decode_items(kept.items)
    kept = msgspec.structs.replace(kept, summary=job.summary, summary_usage=job.usage)
    messages = head_of(chat, items) + messages_of(_conversation(kept))
    chat = msgspec.structs.replace(chat, **take_images(messages)._asdict())
    return msgspec.structs.replace(
        checked,
        stubs=(stub_of(chat),),
        ahead=None,
        packed=msgspec.msgpack.encode((chat,)),
        kept=msgspec.msgpack.encode(kept),
    )


def compaction(job: WriteCompaction, kept: bytes) -> bytes:
    """Return the answer of /v1/responses/compact as JSON.

    The output has the items that the summary does not replace, an assistant message with the
    summary, and the summary as a compaction item. The message is for servers that do not know
    compaction items; this server does not show the message to the model.
    """
    items = listed(_decode_items(open_kept(kept).items), job.stream_id)
    id = item_id(job.stream_id, COMPACTION, f"i{len(items)}")
    last = summary_item(id, job.summary)
    whole = [*items, last]
    places = (place for place in visible(whole) if place < len(items))
    part = {"type": "output_text", "text": last["encrypted_content"], "annotations": []}
    message = {
        "id": item_id(job.stream_id, "message", f"i{len(items) + 1}"),
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    return encode(
        {
            "id": job.stream_id,
            "object": "response.compaction",
            "created_at": job.created,
            "output": [*(items[place] for place in sorted(places)), message, last],
            "usage": job.usage,
        }
    )


def _first_fitting(points: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the smallest cut that fits, or None. A larger cut drops more items."""
    if fits(0):
        return 0
    if len(points) < 2 or not fits(points[-1]):
        return None
    low, high = 0, len(points) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(points[middle]) else (middle, high)
    return points[high]
