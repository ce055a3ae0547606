"""Shortens long conversations of /v1/responses before their requests are admitted."""

import secrets
from typing import Any, NamedTuple

import msgspec

from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.protocols.dialect import dialect_of
from headrace.protocols.fields.common import cache_salt, max_tokens
from headrace.protocols.openai.response_events import ResponseBuilder
from headrace.protocols.openai.responses import ROUTE
from headrace.protocols.requests import to_request
from headrace.streams.events import Error
from headrace.streams.record import Names, Record
from headrace.text.text_model import longest_prompt
from headrace.workers.image_file import prepare_images
from headrace.workers.input_memory import HeldInput
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.request import Chat
from headrace_common.worker_jobs import (
    CheckedBody,
    EncodedAhead,
    EncodePrompts,
    FitImages,
    FitResponse,
    PutSummary,
    SummarizeResponse,
)

# An eighth of the context is left for the answer if the request sets no limit.
_ANSWER_SHARE = 8
# A summary may have this number of tokens, but at most a quarter of the context.
_SUMMARY_TOKENS, _SUMMARY_SHARE = 4096, 4
_UNCHANGED = "The conversation was not compacted and is unchanged"


class Summary(NamedTuple):
    """A summary that the model wrote, with the record and the usage of its request."""

    text: str
    record: Record
    usage: dict[str, Any]


class LongResponses:
    """Shortens the conversations of requests that ask for it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def shorten(self, checked: CheckedBody, host: ModelHost, held: HeldInput) -> CheckedBody:
        """Return the request, with a conversation that is compacted or truncated if necessary.

        `held` counts the input of the request, with the images that are fetched here.
        If the summary fails, the conversation stays as it is. Raise RequestError only if the client
        asked for nothing but the summary, or if the conversation exceeds the context.
        """
        if checked.fields.get("is_compaction"):
            checked = await self._put(await self.summarize(checked, host, held), checked)
        elif (threshold := checked.fields.get("context_management")) is not None:
            checked = await self._compact(checked, host, held, threshold)
        if checked.fields.get("truncation") == "auto":
            checked = await self._fit(checked, host.model, max_tokens(checked.fields), held)
        return checked

    async def summarize(
        self, checked: CheckedBody, host: ModelHost, held: HeldInput, is_asked: bool = True
    ) -> Summary | None:
        """Have the model summarize the conversation of a request.

        If the summary would replace no item, return None unless `is_asked`. If the summary fails,
        raise RequestError and change nothing.
        """
        limit = host.model.max_model_len
        num_tokens = min(_SUMMARY_TOKENS, limit // _SUMMARY_SHARE or _SUMMARY_TOKENS)
        try:
            if checked.fields.get("truncation") == "auto":
                # The request for the summary adds a message of fewer than 256 tokens.
                checked = await self._fit(checked, host.model, num_tokens + 256, held)
            job = SummarizeResponse(num_tokens, is_asked)
            packed = msgspec.msgpack.encode(checked)
            asked = await self._generation.work.do(job, [packed])
            if not asked.stubs:
                return None
            dialect = dialect_of(ROUTE)
            request = to_request(dialect, asked, host.model)
            names = Names(owner=held.owner, can_attach=False)
            id = StreamId(dialect.ID_PREFIX + secrets.token_hex(16))
            stream = await self._generation.open(request, names, asked, id)
            return await stream.audience.pause.unless(_summary_of(stream))
        except RequestError as error:
            raise _failed(error) from None

    async def _compact(
        self, checked: CheckedBody, host: ModelHost, held: HeldInput, threshold: int
    ) -> CheckedBody:
        """Replace the items by a summary if the prompt has `threshold` tokens or does not fit.

        The threshold 0 stands for three quarters of the context. If the summary fails, return the
        request unchanged, unless only the summary could make the prompt fit.
        """
        model = host.model
        threshold = threshold or model.max_model_len * 3 // 4
        longest = longest_prompt(model, model.max_model_len, max_tokens(checked.fields))
        if has_images(checked):
            checked = await self._with_images(checked, held)
            num_tokens = await self.count_with_images(checked, model.names[0], held)
        else:
            if checked.ahead is None:
                salt = cache_salt(checked.fields)
                job = EncodePrompts(longest, model.names[0], cache_salt=salt)
                encoded = await self._generation.work.do(job, [checked.packed])
                ahead = EncodedAhead(model.number, longest, encoded)
                checked = msgspec.structs.replace(checked, ahead=ahead)
            num_tokens = _num_ahead(checked)
        if not threshold or num_tokens < min(threshold, longest + 1):
            return checked
        try:
            summary = await self.summarize(checked, host, held, is_asked=False)
        except RequestError:
            if num_tokens > longest and checked.fields.get("truncation") != "auto":
                raise
            ignored = (*checked.ignored, "context_management")
            return msgspec.structs.replace(checked, ignored=ignored)
        return await self._put(summary, checked)

    async def _put(self, summary: Summary | None, checked: CheckedBody) -> CheckedBody:
        """Replace items of the request with the summary; change nothing without a summary."""
        if summary is None:
            return checked
        put = PutSummary(summary.text, summary.usage)
        return await self._generation.work.do(put, [msgspec.msgpack.encode(checked)])

    async def _fit(
        self, checked: CheckedBody, model: ServedModel, num_answer: int | None, held: HeldInput
    ) -> CheckedBody:
        """Return the request without its oldest items if the prompt leaves no room for an answer.

        `num_answer` is the number of tokens that the answer needs. With None, the answer needs a
        fixed fraction of the context.
        """
        limit = model.max_model_len
        if not limit:
            # Only the engine knows the limit.
            return checked
        room = limit - min(num_answer or limit // _ANSWER_SHARE, limit // 2)
        longest = longest_prompt(model, limit, max_tokens(checked.fields))
        if checked.ahead is not None and _num_ahead(checked) <= room:
            return checked
        job = FitResponse(room, longest, model.number)
        if has_images(checked):
            job = FitImages(room, longest, model.number)
            checked = await self._with_images(checked, held)
        return await self._generation.work.do(job, [msgspec.msgpack.encode(checked)])

    async def count_with_images(self, checked: CheckedBody, model: str, held: HeldInput) -> int:
        """Return the number of tokens of a prompt with images."""
        checked = await self._with_images(checked, held)
        seen = await prepare_images(self._generation.work, checked.packed, model)
        seen.close()
        return sum(map(len, seen.prompts)) // 4

    async def _with_images(self, checked: CheckedBody, held: HeldInput) -> CheckedBody:
        """Return the request with the images that it names by URL."""
        (stub,) = checked.stubs
        assert isinstance(stub, Chat)
        fetcher, work = self._generation.image_fetcher, self._generation.work
        packed = await fetcher.put(work, (stub,), checked.packed)
        stub = msgspec.structs.replace(stub, image_params=(), addresses=())
        checked = msgspec.structs.replace(checked, stubs=(stub,), packed=packed)
        held.resize(checked.num_bytes)
        return checked


def has_images(checked: CheckedBody) -> bool:
    return any(isinstance(prompt, Chat) and prompt.num_images for prompt in checked.stubs)


def _num_ahead(checked: CheckedBody) -> int:
    """Return the length of the prompt, whose tokens were computed in advance."""
    assert checked.ahead is not None
    return sum(map(len, checked.ahead.encoded.prompts)) // 4


async def _summary_of(stream: Found) -> Summary:
    """Return the summary that the stream generates.

    Raise RequestError if there is none, or if the model did not finish it.
    """
    response = ResponseBuilder(stream.record)
    async with stream.audience.reader() as reader:
        async for event in reader:
            await slice_of_loop()
            if isinstance(event, Error):
                raise RequestError(event.code, event.message)
            response.feed(event)
        reader.sent(event)
    whole = response.whole()
    if whole["status"] == "incomplete":
        num_tokens = whole["usage"]["output_tokens"]
        message = f"The summary was cut off at its limit of {num_tokens} tokens."
        raise RequestError("internal_error", message)
    messages = (item for item in whole["output"] if item["type"] == "message")
    text = "".join(part["text"] for item in messages for part in item["content"]).strip()
    if not text:
        raise RequestError("internal_error", "The model wrote no summary.")
    return Summary(text, stream.record, whole["usage"])


def _failed(error: RequestError) -> RequestError:
    """Return the error of a request whose conversation could not be compacted."""
    remedy = "Try again, compact earlier, or continue without compaction."
    if error.code == "context_length_exceeded":
        remedy = "Send truncation: auto to summarize only the newest items, or compact earlier."
    message = f"{_UNCHANGED}. {error.message} {remedy}"
    failed = RequestError(error.code, message, error.param, error.extra, error.retry_after_s)
    return failed.noting(**error.noted)
