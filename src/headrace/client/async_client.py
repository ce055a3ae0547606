"""The asynchronous client: what `following` decides, done with httpx on an event loop."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator
from typing import Any
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
    TIMEOUT,
    URL,
    OnTrouble,
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
from headrace.client.vectors import embedding_request, ranking_request, to_ranking, to_vectors
from headrace_common.answer import Answer, Messages, Piece, Ranked, asked_for


class AsyncClient:
    """A Headrace server, over connections that may break: they are made again by themselves.

    `patience_s` is how long a server may stay away, once it has answered. `on_trouble` gets why
    a call waits, and for how long, before it connects again.
    """

    def __init__(
        self, url: str = URL, api_key: str | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self.on_trouble: OnTrouble = bear
        self.url = to_address(url)
        headers = key_header(api_key)
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT)
        self._patience_s = to_patience(patience_s)
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    async def chat(self, messages: Messages | str, **fields: Any) -> Answer:
        """Answers the last message; a string is the only one."""
        return await self.stream(messages, **fields).answer()

    async def completions(self, prompt: str | list[Any], **fields: Any) -> Answer:
        """Continues raw text, without a chat template; of several prompts, all choices in order."""
        return await self.stream(prompt=prompt, **fields).answer()

    def stream(
        self,
        messages: Messages | str | None = None,
        *,
        prompt: str | list[Any] | None = None,
        **fields: Any,
    ) -> "AsyncStream":
        """An answer to messages, or to a raw `prompt`, as it comes.

        Leaving its `async with` block early stops it on the server.
        """
        post = new_request({**asked_for(messages, prompt), **fields})
        return self._stream(StreamFollower(post, "", -1, self._patience_s))

    def attach(self, stream_id: str, after: int = -1) -> "AsyncStream":
        """A stream that runs or has ended, behind a cursor. Leaving it does not stop it."""
        return self._stream(attached(stream_id, after, self._patience_s))

    async def embed(self, input: str | list[Any], **fields: Any) -> Any:
        """The vector of a text or of token ids, or one for each of several; of length 1."""
        return to_vectors(await self._do(embedding_request(input, fields)), input)

    async def rerank(self, query: str, documents: list[Any], **fields: Any) -> list[Ranked]:
        """The documents, texts or objects with a text, by relevance, the most relevant first."""
        return to_ranking(await self._do(ranking_request(query, documents, fields)))

    async def stop(self, stream_id: str) -> None:
        """Ends a stream wherever it is; its events so far stay readable. Refused for no stream."""
        await self._ask("POST", f"{path_of(stream_id)}/cancel")

    async def models(self) -> list[str]:
        """The names that may be asked for; the first is served if none is."""
        return [str(entry["id"]) for entry in (await self._ask("GET", "/v1/models"))["data"]]

    async def model(self, name: str) -> dict[str, Any]:
        """One of them as the server tells of it: context, size, and what goes into it."""
        return await self._ask("GET", f"/v1/models/{quote(name)}")

    async def close(self) -> None:
        """Leaves the streams that are still followed, then the server."""
        for stream in list(self._streams):
            await stream.leave()
        await self._http.aclose()

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
    """One answer. Iterated, it gives pieces; `updates` gives all that is known."""

    def __init__(
        self, http: httpx.AsyncClient, following: StreamFollower, on_trouble: OnTrouble
    ) -> None:
        self._http = http
        self._following = following
        self._on_trouble = on_trouble
        self._updates: weakref.ref[AsyncGenerator[Update, None]] | None = None

    @property
    def id(self) -> str:
        """Empty until the request was admitted."""
        return self._following.stream_id

    @property
    def cursor(self) -> int:
        """Number of the last event that was taken; `attach` goes on behind it."""
        return self._following.cursor

    @property
    def mode(self) -> str:
        """fresh: the answer stands alone; continue: it is to be appended to the last message."""
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
        """Every event once, over as many connections as it takes, and heartbeats in between."""
        self._following.check_unread()
        updates = self._follow()
        self._updates = weakref.ref(updates)  # who drops the loop leaves it
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
            if following.is_ours:
                await self.stop()

    async def answer(self) -> Answer:
        """The whole answer, once it has ended."""
        if not self._following.has_ended:
            async for _ in self.updates():
                pass
        asked = HttpRequest("GET", path_of(self.id))
        state = await _ask(self._http, asked, self._following.pacing(), self._on_trouble)
        return Answer.of(to_response(state))

    async def stop(self) -> None:
        """Ends it on the server, in a few tries; nothing to do once it has ended."""
        following, pacing = self._following, self._following.stop_pacing()
        with contextlib.suppress(Refused, Unreachable):
            while (asked := following.stop_request()) is not None:
                await asyncio.sleep(pacing.pause_s)
                try:
                    async with self._send(asked) as response:
                        following.stop_answered(response.status_code, response.headers)
                        if response.status_code != 200:
                            pacing.refused(response.status_code, response.headers, b"")
                except LOST as error:
                    pacing.broke(True, reason_of(error))

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Follows it no further, which stops a stream of ours."""
        updates = self._updates() if self._updates else None
        if updates is not None:
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

    def _send(self, sent: HttpRequest) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        if self._http.is_closed:
            raise closed()
        return self._http.stream(sent.method, sent.path, headers=sent.headers, content=sent.body)


async def _close(updates: Any) -> None:
    """Ends the iteration, which stops a stream of ours."""
    # a loop that was left is closed by the event loop, some time later
    while updates.ag_running:  # noqa: ASYNC110, for there is no event of its end
        await asyncio.sleep(0.01)
    await updates.aclose()


async def _ask(
    http: httpx.AsyncClient, sent: HttpRequest, pacing: Pacing, on_trouble: OnTrouble
) -> dict[str, Any]:
    """The object that the server answers with, as soon as it does."""
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
