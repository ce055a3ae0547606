"""Shortens the conversations of /v1/responses that do not fit into the model's context."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.messages import take_images
from headrace.protocols.openai.response_events import open_kept
from headrace.protocols.openai.response_history import cut_points, dropped, runs_of
from headrace.protocols.openai.response_items import NO_MESSAGES, Item, Message, messages_of
from headrace.protocols.prompt_ids import PromptIds, ids_of
from headrace.protocols.worker_model import WorkerModels
from headrace_common.request import Chat
from headrace_common.worker_jobs import CheckedBody, Encoded, EncodedAhead, FitResponse

_decode_checked = msgspec.msgpack.Decoder(CheckedBody).decode
_decode_prompts = msgspec.msgpack.Decoder(tuple[Chat]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_shown = msgspec.json.Decoder(dict[str, Any]).decode


def head_of(chat: Chat, items: Sequence[Item]) -> tuple[Message, ...]:
    """Return the messages before those of the items: the message made from `instructions`."""
    return chat.messages[: len(chat.messages) - len(messages_of(items) or NO_MESSAGES)]


def fit(job: FitResponse, body: bytes, models: WorkerModels) -> CheckedBody:
    """Return the request with the tokens of its chat, without old items if they do not fit.

    The stored items stay complete; the response object names the items that the model did not
    see. If even the shortest conversation does not fit, the request is returned unchanged, and
    admission refuses it.
    """
    checked = _decode_checked(body)
    text = models.asked(checked.fields)
    if text is None:
        # The model is refused later.
        return checked
    kept, (chat,) = open_kept(checked.kept), _decode_prompts(checked.packed)
    items = _decode_items(kept.items)
    head, points = head_of(chat, items), cut_points(items)
    found: dict[int, tuple[Chat, PromptIds]] = {}

    def fits(cut: int) -> bool:
        gone = set(dropped(items, cut))
        shown = [item for place, item in enumerate(items) if place not in gone]
        messages = head + (messages_of(shown) or NO_MESSAGES)
        short = msgspec.structs.replace(chat, **take_images(messages)._asdict()) if cut else chat
        found[cut] = short, ids_of(text.model, short, models.rendering, job.longest)
        return len(found[cut][1].token_ids) <= job.room

    cut = _first_fitting(points, fits)
    if cut is None:
        return checked
    chat, (token_ids, way, changes) = found[cut]
    text.check_placeholders(token_ids)
    encoded = Encoded((token_ids.tobytes(),), way, changes=changes)
    checked = msgspec.structs.replace(checked, ahead=EncodedAhead(job.number, job.longest, encoded))
    if cut == 0:
        return checked
    shown = _decode_shown(kept.shown) | {"truncated_items": runs_of(dropped(items, cut))}
    kept = msgspec.structs.replace(kept, shown=encode(shown))
    return msgspec.structs.replace(
        checked, packed=msgspec.msgpack.encode((chat,)), kept=msgspec.msgpack.encode(kept)
    )


def _first_fitting(points: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the smallest position that fits, or None. A later position drops more items."""
    if fits(0):
        return 0
    if len(points) < 2 or not fits(points[-1]):
        return None
    low, high = 0, len(points) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(points[middle]) else (middle, high)
    return points[high]
