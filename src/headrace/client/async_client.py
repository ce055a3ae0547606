"""The asynchronous client: sends the requests of `following` with httpx."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, overload
from urllib.parse import quote

import httpx

from headrace.client.errors import Refused, Unreachable
from headrace.client.events import Tokens, Update
from headrace.client.following import (
    HttpRequest,
    NextAction,
    StreamFollower,
    attached,
    new_request,
    path_of,
)
from headrace.client.http import (
    LOST,
    NOT_MADE,
    PATIENCE_S,
    STOP_TIMEOUT,
    TIMEOUT,
    URL,
    OnTrouble,
    async_direct_transport,
    bear,
    closed,
    key_header,
    reason_of,
    to_address,
    to_object,
    to_patience,
    to_piece,
    to_response,
    to_send,
)
from headrace.client.pacing import Pacing
from headrace.client.several import async_answers
from headrace.client.vectors import embedding_request, ranking_request, to_ranking, to_vectors
from headrace_common.answer import Answer, Messages, Piece, Ranked, are_several, asked_for
from headrace_common.sampling_options import SamplingOptions, with_options

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray


class AsyncClient:
    """A client of a Headrace server. The client reconnects automatically.

    If a server that has answered before is gone, the client waits for it up to `patience_s`
    seconds. Before each wait, the client calls `on_trouble` with the reason and the seconds.
    """

    def __init__(
        self,
        url: str = URL,
        api_key: str | None = None,
        patience_s: float = PATIENCE_S,
        on_trouble: OnTrouble = bear,
    ) -> None:
        self.on_trouble = on_trouble
        self.url = to_address(url)
        headers = key_header(api_key)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=TIMEOUT,
            transport=async_direct_transport(self.url),
        )
        self._patience_s = to_patience(patience_s)
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    @overload
    async def chat(
        self,
        messages: Messages | str,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Answer: ...

    @overload
    async def chat(
        self,
        messages: list[Messages] | list[str],
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> list[Answer]: ...

    async def chat(
        self,
        messages: Any,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Any:
        """Answer the last message of a conversation, or of each conversation in a list.

        Args:
            messages: Messages as in OpenAI's API. A string is one message of the user. A list of
                strings or of conversations is sent as one request each, at the same time.
            options: Options of the answers.
            progress: Whether to show a progress bar on stderr if there are several conversations.
            **fields: Fields of `/v1/chat/completions`. They take precedence over `options`.

        Returns:
            One Answer, or a list of Answers in the order of the conversations.

        Example:
            >>> answer = await client.chat("Name five animals.", temperature=0)
            >>> answer.text
        """
        if are_several(messages):
            asked = [self.stream(one, options=options, **fields) for one in messages]
            return await async_answers(asked, progress)
        return await self.stream(messages, options=options, **fields).answer()

    async def completions(
        self, prompt: str | list[Any], *, options: SamplingOptions | None = None, **fields: Any
    ) -> Answer:
        """Continue raw text without a template.

        Args:
            prompt: A text or a list of token ids, or a list of such prompts.
            options: Options of the answer.
            **fields: Fields of `/v1/completions`. They take precedence over `options`.

        Returns:
            One Answer with the choices of all prompts in order.

        Example:
            >>> answer = await client.completions("1, 2, 3, 4,", max_tokens=8)
            >>> answer.text
        """
        return await self.stream(prompt=prompt, options=options, **fields).answer()

    def stream(
        self,
        messages: Messages | str | None = None,
        *,
        prompt: str | list[Any] | None = None,
        options: SamplingOptions | None = None,
        **fields: Any,
    ) -> "AsyncStream":
        """Stream the answer to messages or to a raw `prompt`.

        The server stops the stream if the caller leaves its `async with` block early.

        Args:
            messages: Messages as in `chat`, for one conversation.
            prompt: Raw text or token ids as in `completions`, instead of messages.
            options: Options of the answer.
            **fields: Fields of the route. They take precedence over `options`.

        Example:
            >>> async for piece in client.stream("Count from 1 to 5."):
            ...     print(piece.text, end="")
        """
        asked = asked_for(messages, prompt)
        post = new_request({**asked, **with_options(fields, options, is_chat=prompt is None)})
        return self._stream(StreamFollower(post, "", -1, self._patience_s))

    def attach(self, stream_id: str, after: int = -1) -> "AsyncStream":
        """Follow an existing stream from after event `after`.

        Leaving the AsyncStream does not stop the stream on the server.
        """
        return self._stream(attached(stream_id, after, self._patience_s))

    async def embed(self, input: str | list[Any], **fields: Any) -> "NDArray[float32]":
        """Return the vector of one input, or a matrix with one row for each input of a list.

        Args:
            input: A text or a list of token ids, or a list of such inputs.
            **fields: Fields of `/v1/embeddings`, such as `dimensions`.

        Returns:
            Numbers as float32. Vectors have length 1 if the model normalizes them.

        Example:
            >>> vectors = await client.embed(["A wheel.", "A mill."])
            >>> vectors[0] @ vectors[1]
        """
        return to_vectors(await self._do(embedding_request(input, fields)), input)

    async def rerank(self, query: str, documents: list[Any], **fields: Any) -> list[Ranked]:
        """Rank documents (texts or objects with `text`) by relevance, most relevant first."""
        return to_ranking(await self._do(ranking_request(query, documents, fields)))

    async def stop(self, stream_id: str) -> None:
        """Stop a stream on the server; earlier events stay readable.

        Raises Refused if the server has no such stream.
        """
        await self._ask("POST", f"{path_of(stream_id)}/cancel")

    async def models(self) -> list[str]:
        """Return the names of the models. The first model answers requests without a model."""
        return [str(entry["id"]) for entry in (await self._ask("GET", "/v1/models"))["data"]]

    async def model(self, name: str) -> dict[str, Any]:
        """Return the server's description of a model: context length, size and input types."""
        return await self._ask("GET", f"/v1/models/{quote(name)}")

    async def close(self) -> None:
        """Leave the streams that this client still follows, and then close the connections."""
        for stream in list(self._streams):
            await stream.leave()
        await self._http.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    def _stream(self, following: StreamFollower) -> "AsyncStream":
        stream = AsyncStream(self._http, following, self.on_trouble)
        self._streams.add(stream)
        return stream

    async def _ask(self, method: str, path: str) -> dict[str, Any]:
        return await self._do(HttpRequest(method, path))

    async def _do(self, sent: HttpRequest) -> dict[str, Any]:
        return await _ask(self._http, sent, Pacing(self._patience_s), self.on_trouble)


class AsyncStream:
    """One answer. Iteration yields pieces of text; `updates` yields every event."""

    def __init__(
        self, http: httpx.AsyncClient, following: StreamFollower, on_trouble: OnTrouble
    ) -> None:
        self._http = http
        self._following = following
        self._on_trouble = on_trouble
        self._updates: weakref.ref[AsyncGenerator[Update, None]] | None = None
        # Set when the iteration ends for any reason.
        self._is_ending = False

    @property
    def id(self) -> str:
        """The stream's id; empty until the server has accepted the request."""
        return self._following.stream_id

    @property
    def cursor(self) -> int:
        """The number of the last event that was read. `attach` continues after this event."""
        return self._following.cursor

    @property
    def mode(self) -> str:
        """`fresh` if the answer is a new message, `continue` if it extends the last message."""
        return self._following.mode

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        updates = self.updates()
        try:
            async for event in updates:
                if isinstance(event, Tokens):
                    yield to_piece(event, self.id)
        finally:
            await _close(updates)

    def updates(self) -> AsyncGenerator[Update, None]:
        """Yield each event exactly once, plus heartbeats; reconnect if the connection is lost."""
        self._following.check_unread()
        updates = self._follow()
        # A weak reference, so that an abandoned generator is collected and the stream is left.
        self._updates = weakref.ref(updates)
        return updates

    async def _follow(self) -> AsyncGenerator[Update, None]:
        following = self._following
        try:
            while not following.has_ended:
                if following.pause_s:
                    self._on_trouble(following.trouble, following.pause_s)
                await asyncio.sleep(following.pause_s)
                async with contextlib.aclosing(self._connect()) as events:
                    async for event in events:
                        yield event
        finally:
            self._is_ending = True
            if following.is_ours:
                await self.stop()

    async def answer(self) -> Answer:
        """Return the whole answer when the stream has ended."""
        if not self._following.has_ended:
            async for _ in self.updates():
                pass
        asked = HttpRequest("GET", path_of(self.id))
        state = await _ask(self._http, asked, self._following.pacing(), self._on_trouble)
        return Answer.of(to_response(state))

    async def stop(self) -> None:
        """Stop the stream on the server, with a few retries. Do nothing if the stream has ended."""
        following, pacing = self._following, self._following.stop_pacing()
        with contextlib.suppress(Refused, Unreachable):
            while (asked := following.stop_request()) is not None:
                await asyncio.sleep(pacing.pause_s)
                try:
                    async with self._send(asked, STOP_TIMEOUT) as response:
                        following.stop_answered(response.status_code, response.headers)
                        if response.status_code != 200:
                            pacing.refused(response.status_code, response.headers, b"")
                except httpx.TimeoutException:
                    return
                except LOST as error:
                    pacing.broke(True, reason_of(error))

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Stop following. If this object started the stream, the server stops the stream too."""
        updates = self._updates() if self._updates else None
        if updates is None:
            return
        if _is_read(updates) and not self._is_ending:
            # The reading task or thread ends with the stream, or when the client is closed.
            if self._following.is_ours:
                await self.stop()
            return
        await _close(updates)

    async def _connect(self) -> AsyncGenerator[Update, None]:
        following = self._following
        was_connected = True
        reason = "the connection ended"
        try:
            async with self._send(following.request()) as response:
                then = following.answered(response.status_code, response.headers)
                if then is NextAction.REFUSED:
                    body = await response.aread()
                    following.refused(response.status_code, response.headers, body)
                if then is not NextAction.READ:
                    return
                async for data in response.aiter_bytes():
                    for event in following.feed(data):
                        yield event
                        following.applied(event)
                    if following.can_leave:
                        return
        except LOST as error:
            was_connected = not isinstance(error, NOT_MADE)
            reason = reason_of(error)
        following.broke(was_connected, reason)

    def _send(
        self, sent: HttpRequest, timeout: httpx.Timeout = TIMEOUT
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        if self._http.is_closed:
            raise closed()
        return self._http.stream(
            sent.method, sent.path, headers=sent.headers, content=sent.body, timeout=timeout
        )


def _is_read(updates: Any) -> bool:
    """Return whether another task or thread is waiting for the next event."""
    return bool(updates.ag_running)


async def _close(updates: Any) -> None:
    """End the iteration. The iteration then stops the stream if this client started the stream."""
    # The event loop closes an abandoned generator, but not immediately.
    while updates.ag_running:  # noqa: ASYNC110, for there is no event of its end
        await asyncio.sleep(0.01)
    await updates.aclose()


async def _ask(
    http: httpx.AsyncClient, sent: HttpRequest, pacing: Pacing, on_trouble: OnTrouble
) -> dict[str, Any]:
    """Send a request, with retries, and return the JSON object in the server's answer."""
    if http.is_closed:
        raise closed()
    while True:
        if pacing.pause_s:
            on_trouble(pacing.reason, pacing.pause_s)
        await asyncio.sleep(pacing.pause_s)
        try:
            response = await http.send(to_send(http, sent))
        except LOST as error:
            pacing.broke(not isinstance(error, NOT_MADE), reason_of(error))
            continue
        if response.status_code == 200:
            return to_object(response.content)
        pacing.refused(response.status_code, response.headers, response.content)
