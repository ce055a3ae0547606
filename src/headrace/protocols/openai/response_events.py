"""Turns a stream's events into the items, events and response object of /v1/responses."""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.protocols.blocks import Block, Blocks
from headrace.protocols.openai.chunks import ingestion_of
from headrace.protocols.openai.custom_calls import OpenCall
from headrace.protocols.openai.response_history import COMPACTION, Item, summary_item
from headrace.protocols.openai.response_items import item_id
from headrace.protocols.progress_text import ProgressWords
from headrace.streams.events import (
    Accepted,
    AnyEvent,
    Error,
    Finish,
    Progress,
    TokenLogprob,
    Tokens,
    Usage,
)
from headrace.streams.record import Record
from headrace_common.answer import call_id
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece
from headrace_common.request import Request

ResponseEvent = dict[str, Any]
"""One event of the Responses API, without sequence_number. The first key is `type`."""


class StoredBody(msgspec.Struct, frozen=True):
    """The stored parts of a request's body; `items` and `shown` are JSON.

    `items` are all items that led to the answer, including those of earlier responses. `shown` is
    the part of the response object that repeats the request.
    """

    items: bytes = b"[]"
    shown: bytes = b"{}"
    # Maps the model's name for each function in a namespace to the namespace.
    namespaces: dict[str, str] = {}
    # For tools that are not functions: maps the model's names to the tools' types.
    kinds: dict[str, str] = {}
    # The summary that replaced the items in the prompt; empty if the model saw the items.
    summary: str = ""
    # The usage of the request that wrote the summary.
    summary_usage: dict[str, Any] = {}
    # The number of items before the request's own input.
    num_past: int = 0
    # The conversation to which the items belong, as JSON without items; empty if there is none.
    conversation: bytes = b""


open_kept = msgspec.msgpack.Decoder(StoredBody).decode
_shown = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _OpenItem:
    """The item that is being written; the next piece can extend the item."""

    def __init__(self, record: Record, block: Block, namespace: str = "") -> None:
        kind = _KINDS[block.channel]
        self.channel, self._index = block.channel, block.number
        self._named = {"name": block.name.removeprefix(f"{namespace}__")}
        self._named |= {"namespace": namespace} if namespace else {}
        self._id = item_id(record.id, kind, f"o{block.number}")
        self._call_id = call_id(record.id, 0, block.call)
        self._texts: list[str] = []
        self._logprobs: list[Item] = []
        # Set for a message that has ended: `commentary` or `final_answer`.
        self.phase = ""

    def added(self) -> list[ResponseEvent]:
        events = [self._event("response.output_item.added", item=self.shown("in_progress"))]
        if self.channel != TOOL:
            part = {"content_index": 0, "part": self._part()}
            events.append(self._event("response.content_part.added", **part))
        return events

    def add(self, text: str, entries: Sequence[TokenLogprob]) -> ResponseEvent:
        self._texts.append(text)
        if self.channel == TOOL:
            return self._event("response.function_call_arguments.delta", delta=text)
        if self.channel == REASONING:
            return self._event("response.reasoning_text.delta", content_index=0, delta=text)
        logprobs = [_entry(entry) for entry in entries]
        self._logprobs += logprobs
        delta = {"content_index": 0, "delta": text, "logprobs": logprobs}
        return self._event("response.output_text.delta", **delta)

    def done(self, status: str) -> list[ResponseEvent]:
        end = self._event("response.output_item.done", item=self.shown(status))
        text = "".join(self._texts)
        if self.channel == TOOL:
            whole = self._named | {"arguments": text}
            return [self._event("response.function_call_arguments.done", **whole), end]
        more: dict[str, Any] = {"content_index": 0, "text": text}
        kind = "response.reasoning_text.done"
        if self.channel == CONTENT:
            kind, more = "response.output_text.done", more | {"logprobs": self._logprobs}
        part = self._event("response.content_part.done", content_index=0, part=self._part())
        return [self._event(kind, **more), part, end]

    def shown(self, status: str) -> Item:
        """Return the item so far; the content is empty until text arrives."""
        head = {"id": self._id, "type": _KINDS[self.channel], "status": status}
        if self.channel == TOOL:
            arguments = "".join(self._texts)
            return head | {"arguments": arguments, "call_id": self._call_id} | self._named
        has_content = self._texts or status != "in_progress"
        content = {"content": [self._part()] if has_content else []}
        return head | (
            {"summary": []} | content
            if self.channel == REASONING
            else {"role": "assistant"} | content | ({"phase": self.phase} if self.phase else {})
        )

    def _part(self) -> Item:
        text = "".join(self._texts)
        if self.channel == REASONING:
            return {"type": "reasoning_text", "text": text}
        shown = {"type": "output_text", "annotations": [], "logprobs": list(self._logprobs)}
        return shown | {"text": text}

    def _event(self, kind: str, **more: Any) -> ResponseEvent:
        place: ResponseEvent = {"type": kind}
        if "item" not in more:
            place["item_id"] = self._id
        return place | {"output_index": self._index} | more


_KINDS = {CONTENT: "message", REASONING: "reasoning", TOOL: "function_call"}


class ResponseBuilder:
    """The response object of one stream, up to the last event that was fed."""

    def __init__(self, record: Record) -> None:
        self._record = record
        request = record.request
        self._kept = open_kept(request.kept) if request.kept else StoredBody()
        self._status = "queued" if request.response_options.background else "in_progress"
        self._error: Error | None = None
        self._usage: Usage | None = None
        self._ingestion: dict[str, Any] = {}
        self._is_cut_short = False
        # Whether the open item is the last one, and whether the answer has called a tool so far.
        self._is_last = self._has_calls = False
        self._has_phases = record.rendering > 2
        self._ended_at: int | None = None
        self._done: list[Item] = []
        self._open: _OpenItem | OpenCall | None = None
        self._blocks: Blocks[ResponseEvent] = Blocks(self)
        self._words = ProgressWords(record)
        # Log probabilities of tokens whose text is still held back.
        self._entries: list[TokenLogprob] = []

    def take(self, event: AnyEvent) -> list[ResponseEvent]:
        """Return the response events that one event adds. Pass every event from seq 0, in order."""
        match event:
            case Accepted():
                # The openai package requires `created` to come first.
                created = self._response_event("response.created")
                begun = self._response_event(f"response.{self._status}")
                return [created, begun, *self._compacted()]
            case Progress():
                line = self._words.take(event)
                events = self._blocks.feed(ChannelPiece(line, REASONING)) if line else []
                return self._begin() + events
            case Tokens():
                return self._begin() + self._tokens(event)
            case Finish():
                return [self._finish(event)]
            case Error():
                return [self._fail(event)]
        return []

    def _compacted(self) -> list[ResponseEvent]:
        """Return the events of the summary, the output's first item; none without a summary."""
        if not self._kept.summary:
            return []
        item = summary_item(item_id(self._record.id, COMPACTION, "o0"), self._kept.summary)
        self._done = [item]
        place = {"output_index": 0, "item": item}
        return [
            {"type": "response.output_item.added"} | place,
            {"type": "response.output_item.done"} | place,
        ]

    def feed(self, event: AnyEvent) -> None:
        """Add an event. The caller passes every event from seq 0, in order."""
        self.take(event)

    @property
    def output(self) -> list[Item]:
        """Return the items; the last item may be unfinished."""
        if self._open is None:
            return self._done
        status = "incomplete" if self._error else "in_progress"
        item = self._open.shown(status)
        return [*self._done, item] if item else self._done

    def whole(self) -> dict[str, Any]:
        """Return the response object."""
        request, error = self._record.request, self._error
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._record.id,
            "object": "response",
            "created_at": self._record.created,
            "status": self._status,
            "completed_at": self._ended_at,
            "error": {"code": error.code, "message": error.message} if error else None,
            "incomplete_details": reason,
            "model": request.shown_model,
            "output": self.output,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "usage": _sum(_usage(self._usage), self._kept.summary_usage) if self._usage else None,
            **(_served(request) if self._record.rendering > 2 else {}),
            **_shown(self._kept.shown),
            **self._ingestion,
        }

    def bare_progress(self) -> ResponseEvent:
        """Return an event that only reports "in progress", without the body's fields."""
        head = {"id": self._record.id, "object": "response", "created_at": self._record.created}
        shown = head | {
            "status": "in_progress",
            "model": self._record.request.shown_model,
            "output": [],
        }
        return {"type": "response.in_progress", "response": shown}

    def _begin(self) -> list[ResponseEvent]:
        if self._status != "queued":
            return []
        self._status = "in_progress"
        return [self._response_event("response.in_progress")]

    def _tokens(self, event: Tokens) -> list[ResponseEvent]:
        self._entries += event.logprobs
        made = [it for piece in event.pieces for it in self._blocks.feed(piece)]
        if event.end is None:
            return made
        # A request with `generate: false` only processes the prompt; its answer is complete.
        is_prompt_only = self._record.request.sampling.max_tokens == 0
        # An answer without text is one empty message.
        if not self._blocks.num_opened and not is_prompt_only:
            made += self._blocks.begin(ChannelPiece(""))
        self._is_cut_short = event.end.finish_reason == "length" and not is_prompt_only
        self._is_last = True
        return made + self._blocks.close()

    def opened(self, block: Block) -> list[ResponseEvent]:
        namespace = self._kept.namespaces.get(block.name, "")
        kind = self._kept.kinds.get(block.name, "")
        block = block._replace(number=block.number + bool(self._kept.summary))
        self._open = (
            OpenCall(self._record.id, block, namespace, kind)
            if kind
            else _OpenItem(self._record, block, namespace)
        )
        return self._open.added()

    def grown(self, block: Block, text: str) -> list[ResponseEvent]:
        assert self._open is not None
        entries, self._entries = self._entries, []
        added = self._open.add(text, entries)
        return [added] if added else []

    def closed(self, block: Block) -> list[ResponseEvent]:
        assert self._open is not None
        item, self._open = self._open, None
        self._has_calls = self._has_calls or block.channel == TOOL
        has_phase = self._has_phases and block.channel == CONTENT and not self._is_cut_short
        if has_phase and isinstance(item, _OpenItem):
            is_final = self._is_last and not self._has_calls
            item.phase = "final_answer" if is_final else "commentary"
        status = "incomplete" if self._is_cut_short else "completed"
        events = item.done(status)
        whole = item.shown(status)
        assert whole is not None, "only an item in progress may have nothing to show"
        self._done.append(whole)
        return events

    def _finish(self, event: Finish) -> ResponseEvent:
        self._usage, self._ingestion = event.usage, ingestion_of(event)
        self._status = "incomplete" if self._is_cut_short else "completed"
        if not self._is_cut_short:
            self._ended_at = self._record.created + event.at_ms // 1000
        return self._response_event(f"response.{self._status}")

    def _fail(self, event: Error) -> ResponseEvent:
        self._error = event
        self._status = "cancelled" if event.code == "cancelled" else "failed"
        # The API has no event for a cancelled response.
        return self._response_event("response.failed")

    def _response_event(self, kind: str) -> ResponseEvent:
        return {"type": kind, "response": self.whole()}


def _served(request: Request) -> dict[str, Any]:
    """Return the fields that Open Responses requires in addition to OpenAI's types."""
    sampling = request.sampling
    return {
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "service_tier": "default",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _sum(usage: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Add the counts in `more` to the counts of the same names in `usage`."""
    return {
        name: _sum(count, more.get(name, {})) if type(count) is dict else count + more.get(name, 0)
        for name, count in usage.items()
    }


def _entry(entry: TokenLogprob) -> Item:
    top = [_top(other) for other in entry.top]
    return _top(entry) | {"top_logprobs": top}


def _top(entry: TokenLogprob) -> Item:
    return {"token": entry.token, "bytes": list(entry.bytes), "logprob": entry.logprob}
