"""POST /v1/responses: turns bodies into requests, and a stream's events into a response."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.protocols.dialect import encode, named
from headrace.protocols.fields import samplers
from headrace.protocols.fields.client_tools import OfferedTools
from headrace.protocols.fields.common import COMMON, read_common
from headrace.protocols.fields.kinds import Array, Flag, Integer, Kind, Object, String
from headrace.protocols.fields.messages import TEXT_ONLY, take_images, unseen
from headrace.protocols.fields.tools import check_choice, narrow, types_of
from headrace.protocols.framing import SSE
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import chunks as openai
from headrace.protocols.openai import conversations, long_responses
from headrace.protocols.openai.long_responses import head_of
from headrace.protocols.openai.response_events import (
    ResponseBuilder,
    ResponseEvent,
    StoredBody,
    open_kept,
)
from headrace.protocols.openai.response_fields import (
    ContextManagement,
    ConversationId,
    FlatChoice,
    FlatTools,
    Metadata,
    TextFormat,
    Truncation,
    constraint_of,
    with_found,
)
from headrace.protocols.openai.response_history import TRIGGER, Item
from headrace.protocols.openai.response_items import (
    NO_MESSAGES,
    PAST,
    REFERENCE,
    RESPONSE,
    Items,
    client_ids,
    listed,
    messages_of,
    referenced,
)
from headrace.protocols.requests import stub_of
from headrace.protocols.worker_model import WorkerModels
from headrace.streams.events import AnyEvent, Heartbeat, Progress, Queued
from headrace.streams.record import Record
from headrace.text.text_model import TextModel
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Prompt, Request, Route
from headrace_common.worker_jobs import (
    CheckedBody,
    ContinueResponse,
    ListInput,
    ShortenResponse,
    UseConversation,
    UsedConversation,
)

ROUTE: Route = "/v1/responses"
SUMMARY = "Answer a conversation with a response that can be retrieved later"
ID_PREFIX = RESPONSE
REQUIRED: tuple[str, ...] = ("input",)
_SHARED = (
    "model",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "repeat_penalty",
    *samplers.FIELDS,
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "return_progress",
    "return_ingestion",
    "attach",
    "heartbeat",
    "sse_ping_interval",
    "skip_special_tokens",
    "cache_prompt",
    "cache_salt",
    "guess",
    "priority",
)
TABLE: Mapping[str, Kind] = {
    "input": Items(),
    "instructions": String(),
    "tools": FlatTools(),
    "tool_choice": FlatChoice(),
    "parallel_tool_calls": Flag(),
    "text": TextFormat(),
    "reasoning": Object({"effort": String(), "summary": String(), "generate_summary": String()}),
    "chat_template_kwargs": openai_chat.TEMPLATE["chat_template_kwargs"],
    "max_output_tokens": COMMON["max_tokens"],
    # Limits the calls of tools that a server runs itself; this server runs no tools.
    "max_tool_calls": Integer(low=1),
    "top_logprobs": Integer(0, 20),
    "include": Array(String(), most=32),
    "previous_response_id": String(1, 128),
    "conversation": ConversationId(),
    "store": Flag(),
    "background": Flag(),
    "generate": Flag(),
    "metadata": Metadata(),
    "truncation": Truncation(),
    "context_management": ContextManagement(),
    "stream_options": Object({"include_obfuscation": Flag()}),
    **{name: COMMON[name] for name in _SHARED},
}
IN_PROMPTS = openai_chat.IN_PROMPTS | {"input", "instructions", "metadata", "text"}
KEYS: tuple[str, ...] = ("id", "object", "created_at", "status", "model", "output", "usage")
_FOR_TEMPLATE = ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")
_LOGPROBS = "message.output_text.logprobs"
# These fields only refer to content that is stored by a provider.
_ELSEWHERE = {"prompt": "send its content as input"}
_ONE_PAST = (
    "Mutually exclusive parameters. Ensure you are only providing one of: 'previous_response_id' "
    "or 'conversation'."
)
_MAX_SKIPPED = 16
# Fields that the response repeats if they are strings, and that have no other effect.
_LABELS = ("prompt_cache_key", "safety_identifier")
_NO_FUNCTION: Mapping[str, None] = dict.fromkeys(("description", "parameters", "strict"))

ERRORS = openai.ERRORS
FRAMING = SSE


def read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a body sets, after every check that needs no model."""
    for name, remedy in _ELSEWHERE.items():
        if body.get(name) is not None:
            raise _unsupported(name, remedy)
    continues = body.get(PAST) is not None or body.get("conversation") is not None
    if body.get("input") is None and continues:
        body = {**body, "input": []}
    if is_compaction := _ends_with_trigger(body.get("input")):
        body = {**body, "input": body["input"][:-1]}
    fields = read_common(TABLE, REQUIRED, body)
    if PAST in fields and "conversation" in fields:
        raise RequestError("mutually_exclusive_parameters", _ONE_PAST)
    if fields.get("background") and fields.get("store") is False:
        message = "background needs a response that is stored; leave store out, or send true."
        raise RequestError("invalid_value", message, "store")
    fields["messages"] = fields["input"].messages
    placed = ((item, f"input[{i}]") for i, item in enumerate(fields["input"]))
    fields["tools"] = tools = with_found(fields.get("tools", OfferedTools()), placed)
    fields["tool_paths"] = [it.path for it in tools.found]
    tools.refuse_forced(fields.get("tool_choice"))
    narrow(fields)
    check_choice(fields, "tool_choice.name")
    openai_chat.check_template_fields(fields)
    fields["one_call"] = fields.get("parallel_tool_calls") is False
    if wanted := constraint_of(fields.get("text", {})):
        fields["response_format"] = wanted
    if effort := fields.get("reasoning", {}).get("effort"):
        fields["reasoning_effort"] = effort
        kwargs = fields.get("chat_template_kwargs", {})
        # A client that names an effort wants the model to reason.
        fields["chat_template_kwargs"] = {"enable_thinking": effort != "none"} | kwargs
    if "max_output_tokens" in fields:
        fields["max_tokens"] = fields["max_output_tokens"]
    if is_compaction:
        fields["is_compaction"] = True
    if fields.get("generate") is False or is_compaction:
        fields["max_tokens"] = 0
    fields["parameter_types"] = types_of(fields.get("tools", ()))
    fields["skipped"] = (*tools.skipped, *fields["input"].skipped)[:_MAX_SKIPPED]
    if ids := referenced(fields["input"]):
        fields["referenced"] = ids
    if ids := client_ids(fields["input"]):
        fields["item_ids"] = ids
    shown = encode(_repeated(fields, body))
    kept = StoredBody(encode(fields["input"]), shown, tools.namespaces, tools.kinds)
    fields["kept"] = msgspec.msgpack.encode(kept)
    return fields


def _ends_with_trigger(items: Any) -> bool:
    last = items[-1] if type(items) is list and items else None
    return type(last) is dict and last.get("type") == TRIGGER


def to_prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    instructions = fields.get("instructions")
    head = ({"role": "system", "content": instructions},) if instructions else ()
    chat = {"messages": head + (fields["messages"] or NO_MESSAGES)}
    chat |= {name: fields[name] for name in _FOR_TEMPLATE if name in fields}
    return (openai_chat.to_chat(chat),)


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """Make the request with the model's defaults. Raise RequestError if a limit is exceeded."""
    has_logprobs = bool(fields.get("top_logprobs")) or _LOGPROBS in fields.get("include", ())
    shared = fields | {"logprobs": has_logprobs}
    request = openai_chat.to_request(shared, prompts, model)
    options = msgspec.structs.replace(
        request.response_options, background=fields.get("background", False)
    )
    return msgspec.structs.replace(request, response_options=options)


def do(
    job: ContinueResponse | ListInput | UseConversation | ShortenResponse,
    body: bytes,
    models: WorkerModels,
) -> CheckedBody | UsedConversation | bytes:
    """Return the result of a job. Raise RequestError if the job refuses `body`."""
    if isinstance(job, UseConversation):
        return conversations.do(job, body)
    if not isinstance(job, ContinueResponse | ListInput):
        return long_responses.do(job, body, models)
    if isinstance(job, ListInput):
        return input_items(body, job.stream_id, job.limit, job.is_rising, job.after)
    earlier, output, checked, others = _earlier_of(body)
    if job.newest:
        earlier, output = conversations.as_past(earlier, output, job.newest), b"[]"
    checked = go_on(earlier, output, checked, others)
    (chat,) = checked.stubs
    assert isinstance(chat, Chat)
    text = models.asked(checked.fields)
    if chat.num_images and text and not text.model.has_vision:
        raise unseen("conversation" if job.newest else PAST, TEXT_ONLY)
    return checked


NO_ITEMS = msgspec.msgpack.encode(StoredBody())
"""The argument `earlier` of `go_on` for a body with references but no previous response."""


def go_on(
    earlier: bytes, output: bytes, checked: CheckedBody, others: Mapping[str, tuple[bytes, bytes]]
) -> CheckedBody:
    """Return the request as if the client had sent its whole conversation.

    `earlier` is the StoredBody of the previous response, and `output` has that response's own items
    as JSON. `others` maps the ids of further responses to the same two values. References to items
    of these responses are replaced by the items.
    """
    # The worker that read the body knew only the items that were sent. Rewrite all messages from
    # the full list of items. Keep the messages before the items, which came from `instructions`.
    # Paths of references that are now resolved are no longer reported as ignored.
    own, (chat,) = open_kept(checked.kept), _decode_prompts(checked.packed)
    sent, past_items = _decode_items(own.items), _items_of(earlier, output)
    past = Items().check(past_items, "input")
    known = {it["id"]: it for it in past if it.get("id")}
    for id, both in others.items():
        known |= {it["id"]: it for it in listed(_items_of(*both), id)}
    new = [known.get(it.get("id"), it) if it["type"] == REFERENCE else it for it in sent]
    shown = {f"input[{i}]" for i, item in enumerate(new) if item is not sent[i]}
    head = head_of(chat, sent)
    whole = head + (messages_of([*past, *new], len(past)) or NO_MESSAGES)
    chat = msgspec.structs.replace(chat, **take_images(whole)._asdict())
    kept = msgspec.structs.replace(
        own,
        items=encode([*past, *new]),
        num_past=len(past),
        conversation=open_kept(earlier).conversation,
    )
    fields = {name: value for name, value in checked.fields.items() if name != "referenced"}
    if found := _found_earlier([*past, *new], chat, fields):
        chat = msgspec.structs.replace(chat, tools=(*chat.tools, *found))
        fields = fields | {"parameter_types": types_of(chat.tools)}
        kept = msgspec.structs.replace(
            kept,
            namespaces=found.namespaces | own.namespaces,
            kinds=found.kinds | own.kinds,
        )
    return msgspec.structs.replace(
        checked,
        fields=fields,
        stubs=(stub_of(chat),),
        ignored=tuple(path for path in checked.ignored if path not in shown),
        ahead=None,
        packed=msgspec.msgpack.encode((chat,)),
        kept=msgspec.msgpack.encode(kept),
    )


def _items_of(kept: bytes, output: bytes) -> list[Item]:
    """Return the items that led to a response, followed by the response's own items."""
    return _decode_items(open_kept(kept).items) + _decode_items(output)


def _found_earlier(past: Iterable[Item], chat: Chat, fields: dict[str, Any]) -> OfferedTools:
    """Return the tools in `past` that the chat lacks; none if `tool_choice` is not auto."""
    if fields.get("tool_choice", "auto") != "auto":
        return OfferedTools()
    known = {tool["function"]["name"] for tool in chat.tools}
    found = with_found(OfferedTools(), ((item, PAST) for item in past)).found
    new = (it for it in found if it.tool["function"]["name"] not in known)
    return OfferedTools.of(new, ())


def input_items(kept: bytes, stream_id: str, limit: int, is_rising: bool, after: str) -> bytes:
    """Return a page of the items that led to a response, as JSON.

    Raise RequestError if `after` is not the id of one of these items.
    """
    items = listed(_decode_items(open_kept(kept).items), stream_id)
    return encode(conversations.page_of(items, limit, is_rising, after))


class ResponseFrames:
    """Renders the SSE frames of one stream. Event numbers depend only on the log."""

    def __init__(self, record: Record) -> None:
        self.last_number = -1
        # The numbers of the frames in the last result of `render`. A keepalive has the number of
        # the preceding event plus 0.5.
        self.places: list[float] = []
        self._resumed_after = 0
        self._options = options = record.request.response_options
        self._has_numbered_progress = options.return_progress and record.rendering > 1
        self._response = ResponseBuilder(record)

    def render(self, event: AnyEvent) -> list[bytes]:
        """Return the frames of one event: none, one or several."""
        self.places = []
        frames = []
        for added in [*self._response.take(event), *self._advanced(event)]:
            self.last_number += 1
            self.places.append(self.last_number)
            frames.append(self._frame(added))
        keepalive = self._keepalive(event)
        if keepalive is not None:
            self.places.append(self.last_number + 0.5)
            frames.append(self._frame({"type": "keepalive"} | keepalive))
        return frames

    def idle(self) -> bytes:
        """Return a heartbeat: a valid frame that adds nothing to the answer."""
        return self._frame({"type": "keepalive"})

    def resume_after(self, number: int) -> None:
        """Number keepalives from `number` on, the number of the client's last event."""
        self._resumed_after = number

    def _advanced(self, event: AnyEvent) -> list[ResponseEvent]:
        """Return the prompt's progress as an event that clients count as a sign of life."""
        if not (self._has_numbered_progress and isinstance(event, Progress)):
            return []
        return [self._response.bare_progress() | {"prompt_progress": openai.progress_of(event)}]

    def _keepalive(self, event: AnyEvent) -> dict[str, Any] | None:
        """Return the fields of a keepalive; None if the event needs no keepalive."""
        options = self._options
        if isinstance(event, Heartbeat) and options.heartbeat:
            return openai.wait_of(event) if options.return_progress else {}
        if not options.return_progress:
            return None
        if isinstance(event, Queued):
            return {"queue": openai.queue_of(event)}
        if isinstance(event, Progress) and not self._has_numbered_progress:
            return {"prompt_progress": openai.progress_of(event)}
        return None

    def _frame(self, event: dict[str, Any]) -> bytes:
        kind: str = event["type"]
        number = max(self.last_number, self._resumed_after)
        payload = encode({"type": kind, "sequence_number": number} | event)
        return named(kind, payload)


frames = ResponseFrames
response_body = ResponseBuilder


def _repeated(fields: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the response object that repeat the request."""
    reasoning = fields.get("reasoning", {})
    return {
        "background": fields.get("background", False),
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": fields.get("previous_response_id"),
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        "store": fields.get("store", True),
        "text": {"format": fields.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        **({"conversation": {"id": fields["conversation"]}} if "conversation" in fields else {}),
        "tools": [_shown_tool(tool) for tool in body.get("tools") or ()],
        "top_logprobs": fields.get("top_logprobs", 0),
        "truncation": fields.get("truncation", "disabled"),
        **{name: body[name] if type(body.get(name)) is str else None for name in _LABELS},
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as sent; a function has all fields, because clients expect them."""
    return {**_NO_FUNCTION, **tool} if tool["type"] == "function" else tool


def _unsupported(name: str, why: str) -> RequestError:
    return RequestError("unsupported_parameter", f"{name} is not supported here: {why}.", name)


_Earlier = tuple[bytes, bytes, CheckedBody, dict[str, tuple[bytes, bytes]]]
"""The arguments of `go_on` in the format in which a worker receives them."""

_earlier_of = msgspec.msgpack.Decoder(_Earlier).decode
_decode_prompts = msgspec.msgpack.Decoder(tuple[Chat]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
