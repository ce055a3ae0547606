"""Fetches the images that a request names by URL, within limits and only from public hosts."""

import asyncio
import contextlib
import ipaddress
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpcore
import httpx

from headrace.workers.input_memory import InputMemory
from headrace.workers.job_queue import OWNER
from headrace.workers.pool import JobRunner
from headrace_common.errors import RequestError
from headrace_common.request import MAX_IMAGE_BYTES, Chat, Prompt
from headrace_common.worker_jobs import PutImages

_REDIRECTS, _TIMEOUT_S = 3, 10.0
# The number of requests that may fetch images at the same time. Each request may fetch as many
# bytes as a request body may have.
_REQUESTS_AT_ONCE = 8
# The same limit per API key. If hosts never answer, mainly requests of the same key wait.
_REQUESTS_OF_KEY = 4
_RETRY_S = 10.0
_MOVED = (301, 302, 303, 307, 308)
_HEADERS = [("Accept", "image/*"), ("User-Agent", "headrace")]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# The only IPv6 range with addresses of public hosts.
_UNICAST = ipaddress.ip_network("2000::/3")
_IPV4_LAST = [
    # The prefixes of IPv4-compatible, IPv4-mapped, IPv4-translated and NAT64 addresses.
    ipaddress.ip_network(it)
    for it in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")
]
_RESERVED = [
    # Python versions differ in whether these networks are global.
    ipaddress.ip_network(it)
    for it in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20")
]


def is_public(address: Address) -> bool:
    """Return whether an address is global unicast.

    An IPv6 address that leads to IPv4 addresses is judged by these IPv4 addresses alone.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if inside := _embedded_ipv4(address):
            return all(map(is_public, inside))
        if address not in _UNICAST:
            return False
    is_reserved = any(address in network for network in _RESERVED)
    return address.is_global and not (address.is_multicast or is_reserved)


def _embedded_ipv4(address: ipaddress.IPv6Address) -> tuple[ipaddress.IPv4Address, ...]:
    """Return the IPv4 addresses that an IPv6 address leads to or passes through."""
    if any(address in network for network in _IPV4_LAST):
        return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    # A Teredo address contains the addresses of its server and its client.
    return address.teredo or ()


class _Network(httpcore.AsyncNetworkBackend):
    """Connects to the address that was checked. A second lookup could return another address."""

    def __init__(self, allows: Callable[[Address], bool], threads: ThreadPoolExecutor) -> None:
        self._allows = allows
        self._threads = threads
        self._inner = httpcore.AnyIOBackend()
        # The latest name lookup. Its thread continues after the request was given up.
        self._lookup: Future[Any] | None = None

    async def connect_tcp(
        self, host: str, port: int, *arguments: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        self._lookup = self._threads.submit(ask)
        found = await asyncio.wrap_future(self._lookup)
        addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
        if not all(map(self._allows, addresses)):
            raise _Forbidden
        return await self._inner.connect_tcp(str(addresses[0]), port, *arguments, **options)

    def after_lookup(self, call: Callable[[], None]) -> None:
        """Call `call` when no thread looks up a name for this request any more."""
        if self._lookup is None or self._lookup.done():
            call()
            return
        loop = asyncio.get_running_loop()

        def on_end(lookup: "Future[Any]") -> None:
            # The event loop may already be closed when the thread ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(call)

        self._lookup.add_done_callback(on_end)


class _Forbidden(Exception):
    pass


class ImageFetcher:
    """Fetches the images that prompts name by URL, and puts the images into the prompts.

    `allows` returns whether the fetcher may connect to an address. If `allows` is None, no images
    are fetched. `most_bytes` limits the images of a request together, and `memory` the images of
    all requests.
    """

    def __init__(
        self,
        allows: Callable[[Address], bool] | None,
        most_bytes: int,
        memory: InputMemory,
    ) -> None:
        self._allows = allows
        self._most_bytes = most_bytes
        self._memory = memory
        # A separate pool, so that slow name lookups do not delay other work in threads.
        self._threads = ThreadPoolExecutor(_REQUESTS_AT_ONCE, "image's host")
        self._free = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._free_of_key = defaultdict[str, asyncio.Semaphore](
            lambda: asyncio.Semaphore(_REQUESTS_OF_KEY)
        )

    async def put(self, work: JobRunner, prompts: Iterable[Prompt], packed: bytes) -> bytes:
        """Return the packed prompts with the images that the prompts name by URL.

        If an image cannot be fetched, raises RequestError with the image's place in the request.
        """
        for prompt in prompts:
            if isinstance(prompt, Chat) and any(prompt.addresses):
                images = await self._fetch_all(prompt)
                sizes = tuple(map(len, images))
                # The semaphores limit only the fetching. The images also take memory in the queue.
                with self._memory.hold(OWNER.get(), sum(sizes)):
                    return await work.do(PutImages(sizes), [packed, *images])
        return packed

    async def _fetch_all(self, chat: Chat) -> list[bytes]:
        """Return an image for each address; empty if the request itself contains the image."""
        pairs = list(zip(chat.addresses, chat.image_params, strict=True))
        if self._allows is None:
            first = next(param for address, param in pairs if address)
            message = "This server does not fetch images by URL; send data:image/png;base64,… "
            message += "instead, or start the server with --allow-image-urls."
            raise RequestError("image_url_refused", message, first)
        images: list[bytes] = []
        network = _Network(self._allows, self._threads)
        async with (
            self._slot(network),
            httpcore.AsyncConnectionPool(network_backend=network, retries=0) as pool,
        ):
            deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
            for address, param in pairs:
                room = self._most_bytes - sum(map(len, images))
                one = _ImageRequest(pool, param, min(room, MAX_IMAGE_BYTES))
                images.append(await one.fetch(address, deadline) if address else b"")
        return images

    @contextlib.asynccontextmanager
    async def _slot(self, network: _Network) -> AsyncIterator[None]:
        """Wait for a free slot. Raises RequestError if the wait is too long.

        The slot stays occupied until the last name lookup of `network` has ended. Otherwise, the
        slow lookups of one key could occupy all threads.
        """
        async with contextlib.AsyncExitStack() as slots:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    for slot in (self._free_of_key[OWNER.get()], self._free):
                        await slot.acquire()
                        slots.callback(network.after_lookup, slot.release)
            except TimeoutError:
                message = f"This request waited {_TIMEOUT_S:.0f} s for the images of other "
                message += "requests; try again later, or send the images as data URIs."
                raise RequestError("server_overloaded", message, retry_after_s=_RETRY_S) from None
            yield


class _ImageRequest:
    """Fetches one image."""

    def __init__(self, pool: httpcore.AsyncConnectionPool, param: str, most_bytes: int) -> None:
        self._pool = pool
        self._param = param
        self._most_bytes = most_bytes

    async def fetch(self, address: str, deadline: float) -> bytes:
        """Return the image's bytes. Raises RequestError if the fetch fails or takes too long."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._follow(httpx.URL(address))
        except _Forbidden:
            message = "The image's address leads to a host that is not on the public internet; "
            message += "send the image as a data URI."
            raise RequestError("image_url_refused", message, self._param) from None
        except TimeoutError:
            raise self._failed(f"it took more than {_TIMEOUT_S:.0f} s") from None
        except (httpx.InvalidURL, UnicodeError, ValueError):
            raise self._failed("the address is not valid") from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError):
            raise self._failed("its host did not answer correctly") from None

    async def _follow(self, url: httpx.URL) -> bytes:
        for _ in range(_REDIRECTS + 1):
            if url.scheme not in ("http", "https"):
                raise _Forbidden
            async with self._pool.stream("GET", str(url), headers=_HEADERS) as response:
                headers = {name.lower(): value for name, value in response.headers}
                if response.status in _MOVED and (there := headers.get(b"location")):
                    url = url.join(there.decode("ascii"))
                    continue
                if response.status != 200:
                    raise self._failed(f"its host answered {response.status}")
                whole = bytearray()
                async for part in response.aiter_stream():
                    whole += part
                    if len(whole) > self._most_bytes:
                        raise self._too_large()
                return bytes(whole)
        raise self._failed(f"its host redirected more than {_REDIRECTS} times")

    def _failed(self, why: str) -> RequestError:
        message = f"The image could not be fetched: {why}. Send the image as a data URI."
        return RequestError("image_fetch_failed", message, self._param)

    def _too_large(self) -> RequestError:
        message = f"The image has more than {self._most_bytes} bytes, the limit; "
        message += "send a smaller image."
        return RequestError("image_too_large", message, self._param)
