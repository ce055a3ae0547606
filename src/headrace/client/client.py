"""The blocking client: what `following` decides. Written by tools/make_sync_client.py."""

import contextlib
import time
import weakref
from collections.abc import Generator
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


class Client:
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
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT)
        self._patience_s = to_patience(patience_s)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def chat(self, messages: Messages | str, **fields: Any) -> Answer:
        """Answers the last message; a string is the only one."""
        return self.stream(messages, **fields).answer()

    def completions(self, prompt: str | list[Any], **fields: Any) -> Answer:
        """Continues raw text, without a chat template; of several prompts, all choices in order."""
        return self.stream(prompt=prompt, **fields).answer()

    def stream(
        self,
        messages: Messages | str | None = None,
        *,
        prompt: str | list[Any] | None = None,
        **fields: Any,
    ) -> "Stream":
        """An answer to messages, or to a raw `prompt`, as it comes.

        Leaving its loop, or its `with` block, early stops it on the server.
        """
        post = new_request({**asked_for(messages, prompt), **fields})
        return self._stream(StreamFollower(post, "", -1, self._patience_s))

    def attach(self, stream_id: str, after: int = -1) -> "Stream":
        """A stream that runs or has ended, behind a cursor. Leaving it does not stop it."""
        return self._stream(attached(stream_id, after, self._patience_s))

    def embed(self, input: str | list[Any], **fields: Any) -> Any:
        """The vector of a text or of token ids, or one for each of several; of length 1."""
        return to_vectors(self._do(embedding_request(input, fields)), input)

    def rerank(self, query: str, documents: list[Any], **fields: Any) -> list[Ranked]:
        """The documents, texts or objects with a text, by relevance, the most relevant first."""
        return to_ranking(self._do(ranking_request(query, documents, fields)))

    def stop(self, stream_id: str) -> None:
        """Ends a stream wherever it is; its events so far stay readable. Refused for no stream."""
        self._ask("POST", f"{path_of(stream_id)}/cancel")

    def models(self) -> list[str]:
        """The names that may be asked for; the first is served if none is."""
        return [str(entry["id"]) for entry in (self._ask("GET", "/v1/models"))["data"]]

    def model(self, name: str) -> dict[str, Any]:
        """One of them as the server tells of it: context, size, and what goes into it."""
        return self._ask("GET", f"/v1/models/{quote(name)}")

    def close(self) -> None:
        """Leaves the streams that are still followed, then the server."""
        for stream in list(self._streams):
            stream.leave()
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _stream(self, following: StreamFollower) -> "Stream":
        stream = Stream(self._http, following, self.on_trouble)
        self._streams.add(stream)
        return stream

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        return self._do(HttpRequest(method, path))

    def _do(self, sent: HttpRequest) -> dict[str, Any]:
        return _ask(self._http, sent, Pacing(self._patience_s), self.on_trouble)


class Stream:
    """One answer. Iterated, it gives pieces; `updates` gives all that is known."""

    def __init__(
        self, http: httpx.Client, following: StreamFollower, on_trouble: OnTrouble
    ) -> None:
        self._http = http
        self._following = following
        self._on_trouble = on_trouble
        self._updates: weakref.ref[Generator[Update, None, None]] | None = None

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

    def __iter__(self) -> Generator[Piece, None, None]:
        updates = self.updates()
        try:
            for event in updates:
                if isinstance(event, Tokens):
                    yield to_piece(event, self.id)
        finally:
            _close(updates)

    def updates(self) -> Generator[Update, None, None]:
        """Every event once, over as many connections as it takes, and heartbeats in between."""
        self._following.check_unread()
        updates = self._follow()
        self._updates = weakref.ref(updates)  # who drops the loop leaves it
        return updates

    def _follow(self) -> Generator[Update, None, None]:
        following = self._following
        try:
            while not following.has_ended:
                if following.pause_s:
                    self._on_trouble(following.trouble, following.pause_s)
                time.sleep(following.pause_s)
                with contextlib.closing(self._connect()) as events:
                    yield from events
        finally:
            if following.is_ours:
                self.stop()

    def answer(self) -> Answer:
        """The whole answer, once it has ended."""
        if not self._following.has_ended:
            for _ in self.updates():
                pass
        asked = HttpRequest("GET", path_of(self.id))
        state = _ask(self._http, asked, self._following.pacing(), self._on_trouble)
        return Answer.of(to_response(state))

    def stop(self) -> None:
        """Ends it on the server, in a few tries; nothing to do once it has ended."""
        following, pacing = self._following, self._following.stop_pacing()
        with contextlib.suppress(Refused, Unreachable):
            while (asked := following.stop_request()) is not None:
                time.sleep(pacing.pause_s)
                try:
                    with self._send(asked) as response:
                        following.stop_answered(response.status_code, response.headers)
                        if response.status_code != 200:
                            pacing.refused(response.status_code, response.headers, b"")
                except LOST as error:
                    pacing.broke(True, reason_of(error))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *failure: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Follows it no further, which stops a stream of ours."""
        updates = self._updates() if self._updates else None
        if updates is not None:
            _close(updates)

    def _connect(self) -> Generator[Update, None, None]:
        following = self._following
        was_connected = True
        reason = "the connection ended"
        try:
            with self._send(following.request()) as response:
                then = following.answered(response.status_code, response.headers)
                if then is NextAction.REFUSED:
                    body = response.read()
                    following.refused(response.status_code, response.headers, body)
                if then is not NextAction.READ:
                    return
                for data in response.iter_bytes():
                    for event in following.feed(data):
                        yield event
                        following.applied(event)
                    if following.can_leave:
                        return
        except LOST as error:
            was_connected = not isinstance(error, NOT_MADE)
            reason = reason_of(error)
        following.broke(was_connected, reason)

    def _send(self, sent: HttpRequest) -> contextlib.AbstractContextManager[httpx.Response]:
        if self._http.is_closed:
            raise closed()
        return self._http.stream(sent.method, sent.path, headers=sent.headers, content=sent.body)


def _close(updates: Any) -> None:
    """Ends the iteration, which stops a stream of ours."""
    updates.close()


def _ask(
    http: httpx.Client, sent: HttpRequest, pacing: Pacing, on_trouble: OnTrouble
) -> dict[str, Any]:
    """The object that the server answers with, as soon as it does."""
    if http.is_closed:
        raise closed()
    while True:
        if pacing.pause_s:
            on_trouble(pacing.reason, pacing.pause_s)
        time.sleep(pacing.pause_s)
        try:
            response = http.send(to_send(http, sent))
        except LOST as error:
            pacing.broke(not isinstance(error, NOT_MADE), reason_of(error))
            continue
        if response.status_code == 200:
            return to_object(response.content)
        pacing.refused(response.status_code, response.headers, response.content)
