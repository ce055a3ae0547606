"""Bodies as they come in, piece by piece: bounded one by one and together; never looked into."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from headrace.gateway.content_coding import BodyDecoder
from headrace.gateway.http_responses import IGNORED
from headrace.workers.job_line import OWNER
from headrace_common.errors import RequestError
from headrace_common.system import awake

PAUSE_S = 20.0
_NUM_LARGEST = 4  # bodies of the largest size that may be held at once
_NUM_LARGEST_OF_KEY = 2  # of them by one key
_SMALL = 64 << 10  # bytes; smaller bodies are never refused for what others hold
_FORM = "application/x-www-form-urlencoded"


class _Held:
    """The bytes that one request makes the server hold, and the wait that it may be cut off in."""

    def __init__(self) -> None:
        self.owner = OWNER.get()
        self.pieces: list[bytearray] = []
        self.size = 0
        self.wait: asyncio.Timeout | None = None  # while more is to come
        self.is_cut = False

    def add(self, piece: bytes) -> None:
        if self.pieces and len(self.pieces[-1]) < _SMALL:  # a client may send byte by byte
            self.pieces[-1] += piece
        else:
            self.pieces.append(bytearray(piece))
        self.size += len(piece)

    def cut(self) -> None:
        assert self.wait is not None
        self.is_cut = True
        self.wait.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """Reads the bodies of one server, and bounds what it holds of them and of large answers.

    Where that is too much, whoever has been sending for the longest time makes room.
    """

    def __init__(
        self,
        max_bytes: int,
        pause_s: float = PAUSE_S,
        check_simple: Callable[[Headers], None] = lambda headers: None,
    ) -> None:
        """`pause_s`: how long a body may pause.

        `check_simple` refuses requests that a browser lets a page of any site send unasked.
        """
        self._max_bytes = max_bytes
        self._pause_s = pause_s
        self._check_simple = check_simple
        self._held: dict[_Held, None] = {}  # oldest first

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[list[bytearray]]:
        """Yield the decoded pieces of a JSON body; their bytes count until the context is left.

        ClientDisconnect if the client left before the body was whole.
        """
        self._check_content_type(request)
        decoder = BodyDecoder(request.headers)
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
                async for piece in decoder.feed(data):
                    held.add(piece)
                    if max(held.size, num_received) > self._max_bytes:
                        raise self._too_large()
                    self._make_room(held)
                is_whole = not message.get("more_body", False)
            decoder.finish()
            yield held.pieces

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Counts an answer until it is sent."""
        with self._holding() as held:
            held.size = size
            self._make_room(held)
            yield

    @contextlib.contextmanager
    def _holding(self) -> Iterator[_Held]:
        held = _Held()
        self._held[held] = None
        try:
            yield held
        finally:
            del self._held[held]
            held.pieces.clear()  # an error's traceback may keep the list for a while

    def _make_room(self, newest: _Held) -> None:
        """RequestError if there is none to be made; small ones always fit."""
        if newest.size <= _SMALL:
            return
        if newest.owner:
            own = [held for held in self._held if held.owner == newest.owner]
            self._fit(own, _NUM_LARGEST_OF_KEY)
        self._fit(self._held, _NUM_LARGEST)

    def _fit(self, bodies: Iterable[_Held], num_largest: int) -> None:
        """Has these, oldest first, hold no more than so many of the largest size."""
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

        Ollama's documentation uses `curl -d`, which says that the body is a form.
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
            f"The body is larger than the {self._max_bytes} bytes that this server takes; "
            "send less, or raise --max-body-bytes.",
        ).noting(limit_bytes=self._max_bytes)


class HeldAnswer:
    """A large JSON body: it counts as held until the client has taken it, which it must."""

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


async def _next(receive: Receive, held: _Held, pause_s: float) -> Message:
    try:
        async with awake.within(pause_s) as held.wait:
            return await receive()
    except TimeoutError:
        if held.is_cut:
            raise _overloaded() from None
        raise RequestError(
            "body_timeout", f"Nothing of the body came for {pause_s:g} s; send it again."
        ) from None
    finally:
        held.wait = None


def _overloaded() -> RequestError:
    return RequestError(
        "server_overloaded",
        "The server holds too many large bodies just now; try again later.",
        retry_after_s=5,
    )
