"""The blocking client: what `following` decides, done with httpx."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any

import httpx

from headrace.answer import Answer, Piece
from headrace.client.events import AnyEvent, Tokens
from headrace.client.following import Following, Sent, Then, new_request, to_fields
from headrace.client.http import (
    LOST,
    PATIENCE_S,
    TIMEOUT,
    URL,
    key_header,
    to_piece,
    to_response,
)


class Client:
    """A Headrace server, over connections that may break: they are made again by themselves.

    `patience_s` is how long a server may stay away, once it has answered.
    """

    def __init__(
        self, url: str = URL, api_key: str | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._http = httpx.Client(base_url=url, headers=key_header(api_key), timeout=TIMEOUT)
        self._patience_s = patience_s

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Answer:
        """Answers the last message."""
        return self.stream(messages, **fields).answer()

    def completions(self, prompt: str | list[Any], **fields: Any) -> Answer:
        """Continues a prompt; of several, all choices in order."""
        return self._stream({"prompt": prompt, **fields}).answer()

    def stream(self, prompt_or_messages: Any, **fields: Any) -> "Stream":
        """An answer as it comes. Leaving its loop early stops it on the server."""
        return self._stream(to_fields(prompt_or_messages, fields))

    def attach(self, stream_id: str, after: int = -1) -> "Stream":
        """A stream that runs or has ended, behind a cursor. Leaving it does not stop it."""
        return Stream(self._http, Following(None, stream_id, after, self._patience_s))

    def stop(self, stream_id: str) -> None:
        """Ends a stream wherever it is; its events so far stay readable."""
        following = Following(None, stream_id, -1, self._patience_s)
        Stream(self._http, following).stop()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, fields: dict[str, Any]) -> "Stream":
        return Stream(self._http, Following(new_request(fields), "", -1, self._patience_s))


def _bear(reason: str, pause_s: float) -> None:
    pass


class Stream:
    """One answer. Iterated, it gives the pieces of text; `updates` gives all that is known.

    `on_trouble` is told why, and for how long, it waits before it connects again.
    """

    def __init__(self, http: httpx.Client, following: Following) -> None:
        self.on_trouble: Callable[[str, float], None] = _bear
        self._http = http
        self._following = following

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

    def __iter__(self) -> Iterator[Piece]:
        for event in self.updates():
            if isinstance(event, Tokens):
                yield to_piece(event)

    def updates(self) -> Generator[AnyEvent, None, None]:
        """Every event once, over as many connections as it takes."""
        following = self._following
        try:
            while not following.has_ended:
                if following.pause_s:
                    self.on_trouble(following.trouble, following.pause_s)
                time.sleep(following.pause_s)
                yield from self._connect()
        finally:
            if following.is_ours:
                self.stop()

    def answer(self) -> Answer:
        """The whole answer, once it has ended."""
        for _ in self.updates():
            pass
        return Answer.of(to_response(self._fetch(f"/v1/streams/{self.id}")))

    def stop(self) -> None:
        """Ends it on the server; nothing to do once it has ended."""
        with contextlib.suppress(*LOST):
            while (asked := self._following.stop_request()) is not None:
                with self._send(asked) as response:
                    self._following.stop_answered(response.headers)

    def _connect(self) -> Iterator[AnyEvent]:
        following = self._following
        was_connected = True
        reason = "the connection ended"
        try:
            with self._send(following.request()) as response:
                then = following.answered(response.status_code, response.headers)
                if then is Then.REFUSED:
                    body = response.read()
                    following.refused(response.status_code, response.headers, body)
                if then is not Then.READ:
                    return
                for data in response.iter_bytes():
                    for event in following.feed(data):
                        yield event
                        following.applied(event)
        except LOST as error:
            was_connected = not isinstance(error, httpx.ConnectError)
            reason = str(error) or type(error).__name__
        following.broke(was_connected, reason)

    def _send(self, sent: Sent) -> contextlib.AbstractContextManager[httpx.Response]:
        return self._http.stream(sent.method, sent.path, headers=sent.headers, content=sent.body)

    def _fetch(self, path: str) -> dict[str, Any]:
        pacing = self._following.pacing()
        while True:
            time.sleep(pacing.pause_s)
            try:
                response = self._http.get(path)
            except LOST as error:
                pacing.broke(True, str(error) or type(error).__name__)
                continue
            if response.status_code == 200:
                return dict(response.json())
            pacing.refused(response.status_code, response.headers, response.content)
