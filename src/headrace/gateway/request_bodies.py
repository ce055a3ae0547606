"""Reads request bodies in pieces, and limits the size of each body and of all bodies together.

This module never decodes JSON.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from headrace.gateway.content_coding import BodyDecoder
from headrace.gateway.http_responses import IGNORED
from headrace.workers.job_queue import OWNER
from headrace_common.errors import RequestError
from headrace_common.system import awake

PAUSE_S = 20.0
# The limit for the held bytes of all clients, as a multiple of the maximum body size.
_NUM_LARGEST = 4
# The limit for the held bytes of one key, as a multiple of the maximum body size.
_NUM_LARGEST_OF_KEY = 2
# Maximum number of bytes in a small body. Small bodies are never refused because of other bodies.
_SMALL = 64 << 10
_FORM = "application/x-www-form-urlencoded"


class _HeldBytes:
    """Counts the bytes that are held for one request.

    `cut` ends the request's wait for more bytes.
    """

    def __init__(self) -> None:
        self.owner = OWNER.get()
        self.pieces: list[bytearray] = []
        self.size = 0
        # Set while the request waits for more bytes.
        self.wait: asyncio.Timeout | None = None
        self.is_cut = False

    def add(self, piece: bytes) -> None:
        # A client can send single bytes, so new bytes are added to a small last piece.
        if self.pieces and len(self.pieces[-1]) < _SMALL:
            self.pieces[-1] += piece
        else:
            self.pieces.append(bytearray(piece))
        self.size += len(piece)

    def cut(self) -> None:
        assert self.wait is not None
        self.is_cut = True
        self.wait.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """Reads the bodies of one server, and limits the memory for bodies and large answers.

    All clients together can use as much memory as 4 bodies of the largest size. One key can use
    as much memory as 2 such bodies. If a new body exceeds a limit, incomplete bodies are cut off,
    oldest first: a slow client can send its body again. If the new body still does not fit, the
    new body is refused. Complete bodies are never cut off. Bodies of up to 64 KiB are neither cut
    off nor refused.
    """

    def __init__(
        self,
        max_bytes: int,
        pause_s: float = PAUSE_S,
        check_simple: Callable[[Headers], None] = lambda headers: None,
    ) -> None:
        """Set the limits; a body may pause for `pause_s` seconds.

        `check_simple` raises RequestError for a CORS simple request that is not allowed. Browsers
        send simple requests without a preflight.
        """
        self._max_bytes = max_bytes
        self._pause_s = pause_s
        self._check_simple = check_simple
        # The held bytes, oldest first.
        self._held: dict[_HeldBytes, None] = {}

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[list[bytearray]]:
        """Yield the decoded pieces of a JSON body. The pieces count as held during the context.

        Raise ClientDisconnect if the client leaves before the body is complete.
        """
        self._check_content_type(request)
        is_coded = "content-encoding" in request.headers
        decoder = BodyDecoder(request.headers) if is_coded else None
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        with self._holding() as held:
            num_received, is_whole = 0, False
            while not is_whole:
                message = await _next(request.receive, held, self._pause_s)
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                data = message.get("body", b"")
                num_received += len(data)
                if decoder is None:
                    self._take(held, data)
                else:
                    async for piece in decoder.feed(data):
                        self._take(held, piece, num_received)
                is_whole = not message.get("more_body", False)
            if decoder is not None:
                decoder.finish()
            yield held.pieces

    async def read_small(self, request: Request, most: int) -> bytes:
        """Return a JSON body that is small enough to be decoded outside a worker.

        Raise RequestError if the body has more than `most` bytes.
        """
        async with self.read(request) as body:
            size = sum(map(len, body))
            if size > most:
                message = (
                    f"The body has {size:,} bytes; the limit is {most:,}. Send a smaller body."
                )
                raise RequestError("request_too_large", message)
            return b"".join(body)

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count `size` bytes as held during the context."""
        with self._holding() as held:
            held.size = size
            self._make_room(held)
            yield

    @contextlib.contextmanager
    def _holding(self) -> Iterator[_HeldBytes]:
        held = _HeldBytes()
        self._held[held] = None
        try:
            yield held
        finally:
            del self._held[held]
            # The traceback of an error may keep the list alive, so the list is emptied here.
            held.pieces.clear()

    def _take(self, held: _HeldBytes, piece: bytes, num_received: int = 0) -> None:
        """Hold a piece of a body; `num_received` counts the bytes before decoding."""
        held.add(piece)
        if max(held.size, num_received) > self._max_bytes:
            raise self._too_large()
        if held.size > _SMALL:
            self._make_room(held)

    def _make_room(self, newest: _HeldBytes) -> None:
        """Cut off older bodies until the newest body fits.

        Raises RequestError if the newest body cannot fit. Small bodies always fit.
        """
        if newest.size <= _SMALL:
            return
        if newest.owner:
            own = [held for held in self._held if held.owner == newest.owner]
            self._fit(own, _NUM_LARGEST_OF_KEY)
        self._fit(self._held, _NUM_LARGEST)

    def _fit(self, bodies: Iterable[_HeldBytes], num_largest: int) -> None:
        """Cut off the oldest bodies until the rest fits.

        The rest may have `num_largest` times the size limit.
        """
        kept = [held for held in bodies if not held.is_cut]
        over = sum(held.size for held in kept) - num_largest * self._max_bytes
        for held in kept:
            if over > 0 and held.wait is not None and held.size > _SMALL:
                held.cut()
                over -= held.size
        if over > 0:
            raise _overloaded()

    def _check_content_type(self, request: Request) -> None:
        """Raise RequestError if the Content-Type says that the body is not JSON.

        Ollama's routes also accept the Content-Type of a form, because `curl -d` sends that type in
        Ollama's documentation.
        """
        media, _, parameters = request.headers.get("content-type", "").lower().partition(";")
        charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "')
        media = media.strip()
        is_json = media == "application/json" and charset in ("", "utf-8", "utf8")
        is_curls = media == _FORM and request.scope["path"].startswith("/api/")
        if not media or is_curls:
            self._check_simple(request.headers)
        elif not is_json:
            raise RequestError(
                "unsupported_media_type",
                "The body must be UTF-8 JSON; send the header Content-Type: application/json.",
            )

    def _too_large(self) -> RequestError:
        return RequestError(
            "request_too_large",
            f"The body is larger than the limit of {self._max_bytes:,} bytes; send less, or start "
            "the server with a larger --max-body-bytes.",
        ).noting(limit_bytes=self._max_bytes)


class CountedAnswer:
    """Sends a large JSON body. The body counts as held until the client has received all of it.

    A client that receives nothing for PAUSE_S seconds is disconnected.
    """

    def __init__(self, body: bytes, bodies: Bodies, ignored: tuple[str, ...] = ()) -> None:
        self._body = body
        self._bodies = bodies
        self._ignored = ignored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.hold(len(self._body)):
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self._body)).encode()),
            ]
            if self._ignored:
                headers.append(
                    (IGNORED.lower().encode(), ", ".join(self._ignored).encode("latin-1"))
                )
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for start in range(0, len(self._body), _SMALL):
                piece = self._body[start : start + _SMALL]
                try:
                    async with awake.within(PAUSE_S):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError:
                    raise ClientDisconnect from None
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next(receive: Receive, held: _HeldBytes, pause_s: float) -> Message:
    try:
        async with awake.within(pause_s) as held.wait:
            return await receive()
    except TimeoutError:
        if held.is_cut:
            raise _overloaded() from None
        raise RequestError(
            "body_timeout", f"No data arrived for {pause_s:g} s; send the body again."
        ) from None
    finally:
        held.wait = None


def _overloaded() -> RequestError:
    return RequestError(
        "server_overloaded",
        "The server holds too many large bodies now; try again later.",
        retry_after_s=5,
    )
