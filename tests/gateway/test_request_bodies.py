import asyncio
import contextlib
import gzip

import pytest
from backports import zstd
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from headrace.gateway import request_bodies
from headrace.gateway.content_coding import BodyDecoder
from headrace.workers.job_queue import OWNER
from headrace_common.errors import RequestError
from tools.harness.eventually import settle


async def whole(
    headers: dict[str, str], receive: Receive, pause_s: float = 20, limit: int = 20
) -> bytes:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "path": "/v1/messages", "headers": raw}, receive)
    async with request_bodies.Bodies(limit, pause_s).read(request) as body:
        return b"".join(body)


def read(
    *parts: bytes,
    content_type: str = "application/json",
    coding: str | None = None,
    length: int | None = None,
    limit: int = 20,
) -> bytes:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if messages:
        messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    headers = {"content-type": content_type}
    if coding is not None:
        headers["content-encoding"] = coding
    if length is not None:
        headers["content-length"] = str(length)
    return asyncio.run(whole(headers, receive, limit=limit))


def test_the_parts_of_a_body_are_joined() -> None:
    assert read(b'{"a"', b":1}") == b'{"a":1}'


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"],
)
def test_a_body_with_another_content_type_gets_415(content_type: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(b"{}", content_type=content_type)
    assert caught.value.kind.status == 415


def test_a_body_without_a_content_type_is_read_as_json() -> None:
    assert read(b"{}", content_type="") == b"{}"


def test_the_charset_utf8_is_accepted() -> None:
    assert read(b"{}", content_type='Application/JSON; charset="UTF-8"') == b"{}"


SKIPPED = b"\x50\x2a\x4d\x18\x03\0\0\0abc"
EMPTY = zstd.compress(b"")


def wide(body: bytes, window_log: int) -> bytes:
    """Compress the body as one zstd frame that needs a window of 2**window_log bytes."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window_log})
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("", b'{"a":1}'),
        ("identity", b'{"a":1}'),
        ("GZIP", gzip.compress(b'{"a":1}')),
        ("x-gzip", gzip.compress(b'{"a":1}')),
        ("Zstd", zstd.compress(b'{"a":1}')),
        ("zstd", zstd.compress(b'{"a"') + SKIPPED + zstd.compress(b":1}") + EMPTY * 50 + SKIPPED),
        ("zstd", wide(b'{"a":1}', 23)),
    ],
    ids=["none", "identity", "gzip", "x-gzip", "zstd", "zstd frames", "zstd window"],
)
def test_a_body_is_decoded_by_its_content_encoding(coding: str, body: bytes) -> None:
    for step in (1, 5, 1000):
        parts = [body[start : start + step] for start in range(0, len(body), step)]
        assert read(*parts, coding=coding, limit=700) == b'{"a":1}'


@pytest.mark.parametrize("coding", ["br", "deflate", "gzip, gzip", "gzip, zstd", "x" * 9999])
def test_an_unknown_encoding_gets_a_415_that_lists_the_supported_ones(coding: str) -> None:
    with pytest.raises(RequestError, match="gzip, zstd, identity") as caught:
        read(b"{}", coding=coding)
    assert caught.value.kind.status == 415 and len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (gzip.compress(b" " * 10_000_000), 413),
        (gzip.compress(b" " * 21), 413),
        (b"\x1f\x8b\x08" + b"\0" * 7 + b"\0\0\0\xff\xff" * 20, 413),
        (b"{}", 400),
        (b"", 400),
        (gzip.compress(b"{}")[:-1], 400),
        (gzip.compress(b"{}") + b"{}", 400),
        (gzip.compress(b"{}") + gzip.compress(b"{}"), 400),
    ],
    ids=["bomb", "large", "empty blocks", "plain", "nothing", "cut", "trailing", "two members"],
)
def test_a_gzip_body_that_is_too_large_or_malformed_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        read(body, coding="gzip", limit=20 if status == 413 else 100)
    assert caught.value.kind.status == status


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (zstd.compress(b" " * 10_000_000), 413, "20 bytes"),
        (SKIPPED + zstd.compress(b" " * 21), 413, "20 bytes"),
        (EMPTY * 101, 400, "more than 100 frames; compress the body as one"),
        (wide(b"{}", 24), 400, "more than 8 MiB; compress the body with a level of at most 19"),
        (b"{}", 400, "is malformed"),
        (b"", 400, "is cut off"),
        (zstd.compress(b"{}")[:-1], 400, "is cut off"),
        (zstd.compress(b"{}") + EMPTY[:3], 400, "is cut off"),
        (zstd.compress(b"{}") + b"{}" * 9, 400, "is malformed"),
    ],
    ids=["bomb", "large", "frames", "window", "plain", "nothing", "cut", "cut-frame", "trailing"],
)
def test_a_zstd_body_that_is_too_large_or_malformed_is_refused(
    body: bytes, status: int, why: str
) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        read(body, coding="zstd", limit=20 if status == 413 else 1000)
    assert caught.value.kind.status == status


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_compressed_body_is_decoded_in_small_pieces(coding: str) -> None:
    decoder = BodyDecoder(Headers({"content-encoding": coding}))
    body = (gzip if coding == "gzip" else zstd).compress(b" " * 1_000_000)
    sizes = [len(piece) async for piece in decoder.feed(body)]
    assert sum(sizes) == 1_000_000 and max(sizes) <= 64 << 10
    decoder.finish()


def test_a_large_body_is_refused_by_content_length_or_while_reading() -> None:
    for parts, length in (((), 21), ((b" " * 15, b" " * 15), None)):
        with pytest.raises(RequestError) as caught:
            read(*parts, length=length)
        assert caught.value.kind.status == 413
        assert "20 bytes" in caught.value.message


def test_a_disconnect_in_mid_body_ends_the_request() -> None:
    with pytest.raises(ClientDisconnect):
        read()


def test_a_body_that_stops_arriving_gets_408() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RequestError) as caught:
        asyncio.run(whole({"content-type": "application/json"}, never, 0.01))
    assert caught.value.kind.status == 408


HEADERS = [(b"content-type", b"application/json")]


def large(
    shared: request_bodies.Bodies, is_whole: bool
) -> contextlib.AbstractAsyncContextManager[object]:
    """Hold a body of 90,000 bytes; if it is not whole, the rest never arrives."""
    messages = [{"type": "http.request", "body": b" " * 90_000, "more_body": not is_whole}]

    async def receive() -> dict[str, object]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return shared.read(Request({"type": "http", "headers": HEADERS}, receive))


def test_bodies_share_one_limit_and_release_their_bytes() -> None:
    shared = request_bodies.Bodies(100_000)

    async def hold(number: int) -> None:
        async with contextlib.AsyncExitStack() as held:
            for _ in range(number):
                await held.enter_async_context(large(shared, is_whole=True))

    for _ in range(3):
        asyncio.run(hold(4))
    with pytest.raises(RequestError, match="try again later"):
        asyncio.run(hold(5))


async def test_a_key_can_hold_at_most_half_of_the_limit() -> None:
    shared = request_bodies.Bodies(100_000)
    async with contextlib.AsyncExitStack() as held:
        for owner in ("ann", "bob"):
            OWNER.set(owner)
            for _ in range(2):
                await held.enter_async_context(large(shared, is_whole=True))
            with pytest.raises(RequestError, match="try again later"):
                await held.enter_async_context(large(shared, is_whole=True))


async def test_an_unfinished_body_is_dropped_to_make_room_for_others() -> None:
    shared = request_bodies.Bodies(100_000)

    async def drip() -> None:
        async with large(shared, is_whole=False):
            pass

    dripping = [asyncio.create_task(drip()) for _ in range(4)]
    await settle()
    async with large(shared, is_whole=True):
        (cut,), _ = await asyncio.wait(dripping, return_when=asyncio.FIRST_COMPLETED)
        assert cut is dripping[0] and "try again later" in str(cut.exception())
    for task in dripping:
        task.cancel()


def test_a_body_sent_byte_by_byte_is_held_in_large_pieces() -> None:
    messages = [{"type": "http.request", "body": b" ", "more_body": i < 999} for i in range(1000)]

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    async def count() -> int:
        request = Request({"type": "http", "headers": HEADERS}, receive)
        async with request_bodies.Bodies(5000).read(request) as body:
            return len(body)

    assert asyncio.run(count()) == 1


def test_an_unread_answer_counts_toward_the_limit_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_bodies, "PAUSE_S", 0.01)

    async def stuck(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            with pytest.raises(RequestError, match="too many large bodies"), shared.hold(90_000):
                pass
            await asyncio.Event().wait()

    async def run() -> None:
        await request_bodies.CountedAnswer(b" " * 75_000, shared)({}, None, stuck)  # type: ignore[arg-type]

    shared = request_bodies.Bodies(20_000)
    with pytest.raises(ClientDisconnect):
        asyncio.run(run())
    with shared.hold(79_000):
        pass
