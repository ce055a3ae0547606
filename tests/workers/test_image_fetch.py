"""Tests fetching images by URL: limits, refused addresses and fairness between keys."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from headrace.protocols.worker import Jobs
from headrace.workers import image_fetch
from headrace.workers.image_fetch import ImageFetcher, is_public
from headrace.workers.input_memory import InputMemory
from headrace.workers.job_queue import OWNER
from headrace.workers.pool import ThreadJobRunner
from headrace_common.errors import RequestError
from headrace_common.request import Chat

LOOPBACK = ipaddress.ip_address("127.0.0.1")
PUBLIC = [
    *("1.1.1.1", "93.184.216.34", "2606:4700::1111", "2a00:1450::1", "2620:4f:8000::1"),
    *("::1.1.1.1", "::ffff:1.1.1.1", "::ffff:0:1.1.1.1", "64:ff9b::1.1.1.1", "2002:101:101::"),
    "2001:0:101:101::fefe:fefe",  # Teredo, by 1.1.1.1 to the same
]
NOT_PUBLIC = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0"),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    # These are not assigned or not for hosts.
    *("192.0.0.8", "192.0.0.9", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1"),
    *("203.0.113.1", "240.0.0.1", "0.1.2.3", "fec0::1", "4000::1", "5f00::1", "8000::1"),
    *("100::1", "2001:1::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "3fff::1"),
    # These contain an IPv4 address: mapped, compatible, translated, NAT64, 6to4 and Teredo.
    *("::ffff:127.0.0.1", "::127.0.0.1", "::10.0.0.1", "::ffff:0:127.0.0.1", "::ffff:0:0:1"),
    *("64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::192.88.99.1", "2002:7f00:1::"),
    *("2001:0:101:101::80ff:fffe", "2001:0:7f00:1::fefe:fefe", "64:ff9b:1::7f00:1"),
    *(
        "64:ff9b:1::1.1.1.1",
        "64:ff9b:1:a00::1.1.1.1",
    ),  # where it is inside, only its net knows
    *("fe80::1%1", "ff0e::1"),
]


class Site(BaseHTTPRequestHandler):
    """A site: /moved/N redirects N times, /to/HOST to a host, and /large has a large body."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        _, kind, *rest = self.path.split("/")
        if kind == "moved" and int(rest[0]):
            self._answer(302, Location=f"/moved/{int(rest[0]) - 1}")
        elif kind == "to":
            self._answer(307, Location=f"http://{rest[0]}:{self.server.server_port}/")  # type: ignore[attr-defined]
        elif kind == "file":
            self._answer(301, Location="file:///etc/passwd")
        elif kind == "status":
            self._answer(int(rest[0]))
        elif kind == "slow":
            self.server.released.wait(60)  # type: ignore[attr-defined]
        else:
            self._answer(200)
            size = 64 << 10 if kind == "large" else 1
            self.wfile.write(b"image" * size)

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Site, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.released = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.released.set()  # type: ignore[attr-defined]
        server.shutdown()


def local_fetcher(most_bytes: int = 1000, memory: InputMemory | None = None) -> ImageFetcher:
    return ImageFetcher(LOOPBACK.__eq__, most_bytes, memory or InputMemory())


def fetch(*urls: str, most_bytes: int = 1000, allows: Any = LOOPBACK.__eq__) -> list[bytes]:
    """Fetch the images of a packed chat as a request would, and return them."""
    given = tuple(b"" if url else b"came along" for url in urls)
    paths = tuple(f"messages[0].content[{i}]" for i in range(len(urls)))
    chat = Chat((), images=given, image_params=paths, addresses=urls)

    async def ask() -> bytes:
        work = ThreadJobRunner(Jobs.__new__(Jobs))
        packed = msgspec.msgpack.encode((chat,))
        return await ImageFetcher(allows, most_bytes, InputMemory()).put(work, (chat,), packed)

    (found,) = msgspec.msgpack.decode(asyncio.run(ask()), type=tuple[Chat, ...])
    assert found.addresses == () and found.image_params == paths
    return list(found.images)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_allowed(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_recognized_in_any_notation(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


def test_images_keep_their_order_and_three_redirects_are_followed(site: str) -> None:
    assert fetch(f"{site}/a", "", f"{site}/moved/3") == [b"image", b"came along", b"image"]


@pytest.mark.parametrize(
    "path, code, says",
    [
        ("/moved/4", "image_fetch_failed", "redirected more than 3 times"),
        ("/status/404", "image_fetch_failed", "answered 404"),
        ("/large", "image_too_large", "1000 bytes"),
        ("/to/127.0.0.2", "image_url_refused", "public internet"),
        ("/file", "image_url_refused", "public internet"),
    ],
)
def test_an_image_that_cannot_be_fetched_is_reported_with_its_position(
    site: str, path: str, code: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as error:
        fetch("", site + path)
    assert (error.value.code, error.value.param) == (code, "messages[0].content[1]")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]"])
def test_no_image_is_fetched_from_this_machine(site: str, host: str) -> None:
    with pytest.raises(RequestError) as error:
        fetch(site.replace("127.0.0.1", host), allows=is_public)
    assert error.value.code in ("image_url_refused", "image_fetch_failed")
    assert Site.asked == []


@pytest.mark.parametrize("url", ["http://", "http://a b/", "http://[::1", "https://a:99999/"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError) as error:
        fetch(url, allows=is_public)
    assert error.value.code == "image_fetch_failed"


def test_a_host_that_accepts_no_connection_is_reported(site: str) -> None:
    with socket.socket() as taken, pytest.raises(RequestError, match="did not answer"):
        taken.bind(("127.0.0.1", 0))  # and never listens
        fetch(f"http://127.0.0.1:{taken.getsockname()[1]}/")


def test_a_fetch_from_a_slow_host_times_out(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "_TIMEOUT_S", 0.2)
    with pytest.raises(RequestError, match="took more than") as error:
        fetch(f"{site}/slow")
    assert error.value.code == "image_fetch_failed"


async def test_fetched_images_count_toward_the_input_memory(site: str) -> None:
    memory, work = InputMemory(1 << 20), ThreadJobRunner(Jobs.__new__(Jobs))
    chat = Chat((), images=(b"",), image_params=("p",), addresses=(f"{site}/large",))
    packed = msgspec.msgpack.encode((chat,))
    with memory.hold("", 1 << 20), pytest.raises(RequestError) as refused:
        await local_fetcher(1 << 20, memory).put(work, (chat,), packed)
    assert refused.value.code == "server_overloaded"
    assert len(await local_fetcher(1 << 20, memory).put(work, (chat,), packed)) > 64 << 10
    assert not memory.num_bytes


async def test_a_silent_host_does_not_delay_the_images_of_other_keys(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_fetch, "_TIMEOUT_S", 50.0)
    fetcher, work = local_fetcher(), ThreadJobRunner(Jobs.__new__(Jobs))

    def ask(owner: str, path: str) -> asyncio.Task[bytes]:
        OWNER.set(owner)
        chat = Chat((), images=(b"",), image_params=("p",), addresses=(site + path,))
        packed = msgspec.msgpack.encode((chat,))
        return asyncio.create_task(fetcher.put(work, (chat,), packed))

    silent = [ask("mallory", "/slow") for _ in range(16)]
    while not Site.asked:
        await asyncio.sleep(0.001)
    try:
        assert b"image" in await ask("alice", "/a")
        assert not any(it.done() for it in silent)
    finally:
        for task in silent:
            task.cancel()
        await asyncio.wait(silent)


async def test_a_slow_dns_lookup_does_not_block_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_answer, asked = threading.Event(), threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        asked.set()
        may_answer.wait(30)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    chat = Chat((), images=(b"",), image_params=("p",), addresses=("http://slow.example/",))
    work = ThreadJobRunner(Jobs.__new__(Jobs))
    fetching = asyncio.create_task(local_fetcher().put(work, (chat,), b""))
    while not asked.is_set():
        await asyncio.sleep(0.001)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 20) == "done"
    finally:
        may_answer.set()
    with pytest.raises(RequestError, match="did not answer"):
        await fetching


async def test_slow_dns_lookups_do_not_delay_other_keys(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, real = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *rest: Any, **named: Any) -> Any:
        if host == "slow.example":
            may_answer.wait(60)
        return real("127.0.0.1", *rest, **named)

    fetcher, work = local_fetcher(), ThreadJobRunner(Jobs.__new__(Jobs))

    async def ask(owner: str, url: str) -> bytes:
        OWNER.set(owner)
        chat = Chat((), images=(b"",), image_params=("p",), addresses=(url,))
        return await fetcher.put(work, (chat,), msgspec.msgpack.encode((chat,)))

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(image_fetch, "_TIMEOUT_S", 0.2)
    try:
        for _ in range(3):
            slow = [ask("mallory", "http://slow.example/") for _ in range(4)]
            for failure in await asyncio.gather(*slow, return_exceptions=True):
                assert isinstance(failure, RequestError)
        monkeypatch.setattr(image_fetch, "_TIMEOUT_S", 20.0)
        assert b"image" in await asyncio.create_task(ask("alice", f"{site}/a"))
    finally:
        may_answer.set()


def test_a_fetch_that_waits_too_long_for_others_may_be_retried(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_fetch, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(image_fetch, "_REQUESTS_OF_KEY", 0)
    with pytest.raises(RequestError, match="try again later") as error:
        fetch(f"{site}/a")
    assert (error.value.code, error.value.retry_after_s) == ("server_overloaded", 10)


def test_the_images_of_a_request_share_one_size_limit(site: str) -> None:
    assert fetch(f"{site}/a", f"{site}/b", most_bytes=10) == [b"image"] * 2
    with pytest.raises(RequestError) as error:
        fetch(f"{site}/a", f"{site}/b", most_bytes=9)
    assert (error.value.code, error.value.param) == ("image_too_large", "messages[0].content[1]")


def test_image_urls_are_refused_with_the_flag_that_allows_them(site: str) -> None:
    with pytest.raises(RequestError, match="--allow-image-urls") as error:
        fetch("", f"{site}/a", allows=None)
    assert (error.value.code, error.value.param) == ("image_url_refused", "messages[0].content[1]")
    assert Site.asked == []
