"""POST /infill, llama.cpp's route: text that belongs between what stands before and behind it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.request import Infill, Prompt, Request, Route
from headrace.generation.served import ServedModel
from headrace.protocols import openai, requests
from headrace.protocols.common_fields import COMMON, read_common
from headrace.protocols.dialect import data, encode
from headrace.protocols.fields import Array, Integer, Kind, Object, String
from headrace.protocols.openai_completions import ends_of_gap
from headrace.streams.events import (
    Accepted,
    AnyEvent,
    ChoiceEnd,
    Error,
    Finish,
    Heartbeat,
    Progress,
    Queued,
    Tokens,
)
from headrace.streams.record import Record
from headrace.streams.tally import Tally

ROUTE: Route = "/infill"
SUMMARY = "Fill in a text's middle"
ID_PREFIX = "infill-"
REQUIRED: tuple[str, ...] = ("input_prefix", "input_suffix")
_MAX_FILES = 1024
_SIDES: Mapping[str, Kind] = {
    "input_prefix": String(),
    "input_suffix": String(),
    "prompt": String(),
    "input_extra": Array(Object({"filename": String(), "text": String()}), _MAX_FILES),
}
TABLE: Mapping[str, Kind] = {
    **_SIDES,
    **COMMON,
    "n": Integer(1, 1),
    "n_predict": Integer(low=0, also=(-1,)),
    "samplers": Array(String(), 64),
}
IN_PROMPTS = frozenset(_SIDES)
KEYS: tuple[str, ...] = ("index", "content", "tokens", "stop", "model", "stop_type", "timings")
ERRORS = openai.ERRORS


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields, checked as far as they need no model.

    The order of samplers is one and the same here; who gives another is told that it was left out.
    """
    fields = read_common(TABLE, REQUIRED, body)
    if fields.pop("samplers", None):
        fields["skipped"] = ("samplers",)
    limits = (fields.pop("n_predict", -1), fields.get("max_tokens", -1))
    fields["max_tokens"] = min((limit for limit in limits if limit != -1), default=-1)
    return fields


def to_prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    """As llama.cpp has it, `prompt` is what was typed at the gap: more of the text before it."""
    files = tuple(
        (file.get("filename", ""), file.get("text", "")) for file in fields.get("input_extra", ())
    )
    before = fields["input_prefix"] + fields.get("prompt", "")
    return (Infill(before, fields["input_suffix"], files),)


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: ServedModel) -> Request:
    """The request, by the model's limits and with its defaults."""
    request = requests.make_request(ROUTE, prompts, fields, model)
    stops = request.sampling.stop_token_ids + ends_of_gap(prompts, model, "input_suffix")
    sampling = msgspec.structs.replace(request.sampling, stop_token_ids=stops)
    return msgspec.structs.replace(request, sampling=sampling)


class InfillFrames:
    """Chunks of text, then one with `stop` and the figures."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._wire = record.request.wire
        self._tally = Tally()

    def render(self, event: AnyEvent) -> list[bytes]:
        self._tally.feed(event)
        match event:
            case Tokens() if event.text or event.ids:
                return [self._chunk(event.text, event.ids)]
            case Finish():
                return [data(encode(_ended(self._record, event, "", ())))]
            case Error():
                return [ERRORS.frame(event)]
            case Accepted() | Heartbeat():
                return [self.idle()] if self._wire.heartbeat else []
            case Queued() if self._wire.return_progress:
                return [self._chunk(queue=openai.queue_of(event))]
            case Progress() if self._wire.return_progress:
                return [self._chunk(prompt_progress=openai.progress_of(event))]
        return []

    def idle(self) -> bytes:
        """A heartbeat: parses as data, adds nothing."""
        return self._chunk()

    def _chunk(self, text: str = "", ids: tuple[int, ...] = (), **more: Any) -> bytes:
        usage = self._tally.usage
        counts = {
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
        }
        head = {"index": 0, "content": text, "tokens": ids, "stop": False}
        return data(encode(head | counts | more))


class InfillBody:
    """The whole answer."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._finish: Finish | None = None

    def feed(self, event: AnyEvent) -> None:
        match event:
            case Tokens():
                self._texts.append(event.text)
                self._ids += event.ids
            case Finish():
                self._finish = event

    def whole(self) -> dict[str, Any]:
        assert self._finish, "an answer is asked for before its end"
        return _ended(self._record, self._finish, "".join(self._texts), self._ids)


def _ended(record: Record, finish: Finish, text: str, ids: Any) -> dict[str, Any]:
    (end,) = finish.ends
    return {
        "index": 0,
        "content": text,
        "tokens": ids,
        "stop": True,
        "model": record.request.model,
        "tokens_predicted": finish.usage.completion_tokens,
        "tokens_evaluated": finish.usage.prompt_tokens,
        "tokens_cached": finish.usage.cached_tokens,
        "truncated": False,
        "stop_type": _stop_type(end),
        "stopping_word": end.stop_reason if isinstance(end.stop_reason, str) else "",
        "timings": openai.timings_of(finish.timings),
    }


def _stop_type(end: ChoiceEnd) -> str:
    if end.finish_reason == "length":
        return "limit"
    return "word" if isinstance(end.stop_reason, str) else "eos"


def frames(record: Record) -> InfillFrames:
    return InfillFrames(record)


def response_body(record: Record) -> InfillBody:
    return InfillBody(record)
