"""An answer of /v1/responses as it grows: items, the events that tell of them, and the whole."""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.protocols.blocks import Block, Blocks
from headrace.protocols.openai.chunks import ingestion_of
from headrace.protocols.openai.custom_calls import OpenCall
from headrace.protocols.openai.response_items import Item, item_id
from headrace.protocols.progress_words import ProgressWords
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

ResponseEvent = dict[str, Any]
"""One event but for its sequence_number; `type` is its first key."""


class KeptBody(msgspec.Struct, frozen=True):
    """The parts of a request's body that are stored, both as JSON.

    `items` are all that led to the answer, those of earlier responses included; `shown` is the part
    of the response object that repeats the request.
    """

    items: bytes = b"[]"
    shown: bytes = b"{}"
    namespaces: dict[str, str] = {}  # of functions that stand in one, by the model's names for them
    kinds: dict[str, str] = {}  # the types of tools that are no functions, by the same names


open_kept = msgspec.msgpack.Decoder(KeptBody).decode
_shown = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _OpenItem:
    """The item that the next piece may belong to."""

    def __init__(self, record: Record, block: Block, namespace: str = "") -> None:
        kind = _KINDS[block.channel]
        self.channel, self._index = block.channel, block.number
        self._named = {"name": block.name.removeprefix(f"{namespace}__")}
        self._named |= {"namespace": namespace} if namespace else {}
        self._id = item_id(record.id, kind, f"o{block.number}")
        self._call_id = call_id(record.id, 0, block.call)
        self._texts: list[str] = []
        self._logprobs: list[Item] = []

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
        """The item as it stands; without content before there is any."""
        head = {"id": self._id, "type": _KINDS[self.channel], "status": status}
        if self.channel == TOOL:
            arguments = "".join(self._texts)
            return head | {"arguments": arguments, "call_id": self._call_id} | self._named
        has_content = self._texts or status != "in_progress"
        content = {"content": [self._part()] if has_content else []}
        return head | (
            {"summary": []} | content
            if self.channel == REASONING
            else {"role": "assistant"} | content
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


class GrowingResponse:
    """The response object of one stream, as far as its events have come; any time can be asked."""

    def __init__(self, record: Record) -> None:
        self._record = record
        request = record.request
        self._kept = open_kept(request.kept) if request.kept else KeptBody()
        self._status = "queued" if request.response_options.background else "in_progress"
        self._error: Error | None = None
        self._usage: Usage | None = None
        self._ingestion: dict[str, Any] = {}
        self._is_cut_short = False
        self._ended_at: int | None = None
        self._done: list[Item] = []
        self._open: _OpenItem | OpenCall | None = None
        self._blocks: Blocks[ResponseEvent] = Blocks(self)
        self._words = ProgressWords(record)
        self._entries: list[TokenLogprob] = []  # of tokens whose text is still held back

    def take(self, event: AnyEvent) -> list[ResponseEvent]:
        """The response events that one event adds. Takes every event from seq 0, in order."""
        match event:
            case Accepted():
                # the openai package wants `created` before anything else
                return [self._told("response.created"), self._told(f"response.{self._status}")]
            case Progress():
                line = self._words.take(event)
                said = self._blocks.feed(ChannelPiece(line, REASONING)) if line else []
                return self._begin() + said
            case Tokens():
                return self._begin() + self._tokens(event)
            case Finish():
                return [self._finish(event)]
            case Error():
                return [self._fail(event)]
        return []

    def feed(self, event: AnyEvent) -> None:
        """Takes every event from seq 0, in order."""
        self.take(event)

    @property
    def output(self) -> list[Item]:
        """The items; the last one may be unfinished."""
        if self._open is None:
            return self._done
        status = "incomplete" if self._error else "in_progress"
        item = self._open.shown(status)
        return [*self._done, item] if item else self._done

    def whole(self) -> dict[str, Any]:
        """The response object."""
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
            "usage": _usage(self._usage) if self._usage else None,
            **_shown(self._kept.shown),
            **self._ingestion,
        }

    def at_work(self) -> ResponseEvent:
        """An event that says no more than that it is in progress: the response without its body."""
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
        return [self._told("response.in_progress")]

    def _tokens(self, event: Tokens) -> list[ResponseEvent]:
        self._entries += event.logprobs
        made = [told for piece in event.pieces for told in self._blocks.feed(piece)]
        if event.end is None:
            return made
        if not self._blocks.num_opened:  # an answer of no text is a message of none
            made += self._blocks.begin(ChannelPiece(""))
        self._is_cut_short = event.end.finish_reason == "length"
        return made + self._blocks.close()

    def opened(self, block: Block) -> list[ResponseEvent]:
        namespace = self._kept.namespaces.get(block.name, "")
        kind = self._kept.kinds.get(block.name, "")
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
        status = "incomplete" if self._is_cut_short else "completed"
        told = item.done(status)
        whole = item.shown(status)
        assert whole is not None, "only an item in progress may have nothing to show"
        self._done.append(whole)
        return told

    def _finish(self, event: Finish) -> ResponseEvent:
        self._usage, self._ingestion = event.usage, ingestion_of(event)
        self._status = "incomplete" if self._is_cut_short else "completed"
        if not self._is_cut_short:
            self._ended_at = self._record.created + event.at_ms // 1000
        return self._told(f"response.{self._status}")

    def _fail(self, event: Error) -> ResponseEvent:
        self._error = event
        self._status = "cancelled" if event.code == "cancelled" else "failed"
        return self._told("response.failed")  # there is none for a response that was cancelled

    def _told(self, kind: str) -> ResponseEvent:
        return {"type": kind, "response": self.whole()}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _entry(entry: TokenLogprob) -> Item:
    top = [_top(other) for other in entry.top]
    return _top(entry) | {"top_logprobs": top}


def _top(entry: TokenLogprob) -> Item:
    return {"token": entry.token, "bytes": list(entry.bytes), "logprob": entry.logprob}
