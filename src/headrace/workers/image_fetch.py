"""Images that a request names by address: fetched within limits, from public hosts alone."""

import asyncio
import contextlib
import ipaddress
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpcore
import httpx

from headrace.workers.job_line import OWNER
from headrace.workers.pool import Work
from headrace_common.errors import RequestError
from headrace_common.jobs import PutImages
from headrace_common.request import MAX_IMAGE_BYTES, Chat, Prompt

_REDIRECTS, _TIMEOUT_S = 3, 10.0
_REQUESTS_AT_ONCE = 8  # each may hold as many bytes as a body has
_REQUESTS_OF_KEY = 4  # hosts that never answer hold up their own key's first
_RETRY_S = 10.0
_MOVED = (301, 302, 303, 307, 308)
_HEADERS = [("Accept", "image/*"), ("User-Agent", "headrace")]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_UNICAST = ipaddress.ip_network("2000::/3")  # all that IPv6 has given out for public hosts
_IPV4_LAST = [
    ipaddress.ip_network(it)  # compatible, mapped, translated, and NAT64
    for it in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")
]
_RESERVED = [
    ipaddress.ip_network(it)  # Python's versions do not agree on these
    for it in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20")
]


def is_public(address: Address) -> bool:
    """Whether an address is global unicast; one that leads to IPv4 is judged by that."""
    if isinstance(address, ipaddress.IPv6Address):
        if inside := _inside(address):
            return all(map(is_public, inside))
        if address not in _UNICAST:
            return False
    is_reserved = any(address in network for network in _RESERVED)
    return address.is_global and not (address.is_multicast or is_reserved)


def _inside(address: ipaddress.IPv6Address) -> tuple[ipaddress.IPv4Address, ...]:
    """The addresses of IPv4 that it leads to, or by way of."""
    if any(address in network for network in _IPV4_LAST):
        return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    return address.teredo or ()  # server and client


class _Network(httpcore.AsyncNetworkBackend):
    """Connects to the address that it has checked: asked again, a name could give another."""

    def __init__(self, allows: Callable[[Address], bool], threads: ThreadPoolExecutor) -> None:
        self._allows = allows
        self._threads = threads
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self, host: str, port: int, *arguments: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
        if not all(map(self._allows, addresses)):
            raise _Forbidden
        return await self._inner.connect_tcp(str(addresses[0]), port, *arguments, **options)


class _Forbidden(Exception):
    pass


class ImageFetcher:
    """Puts images into prompts that name them. `allows` says of each address whether it may be
    asked; without, no image is fetched at all. `most_bytes` are those of a request's images.
    """

    def __init__(self, allows: Callable[[Address], bool] | None, most_bytes: int) -> None:
        self._allows = allows
        self._most_bytes = most_bytes
        # names that nobody answers for hold up no other work that is done in threads
        self._threads = ThreadPoolExecutor(_REQUESTS_AT_ONCE, "image's host")
        self._free = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._free_of_key = defaultdict[str, asyncio.Semaphore](
            lambda: asyncio.Semaphore(_REQUESTS_OF_KEY)
        )

    async def put(self, work: Work, prompts: Iterable[Prompt], packed: bytes) -> bytes:
        """The packed prompts with all images; RequestError names the one that cannot be had."""
        for prompt in prompts:
            if isinstance(prompt, Chat) and any(prompt.addresses):
                images = await self._fetch_all(prompt)
                return await work.do(PutImages((*map(len, images),)), [packed, *images])
        return packed

    async def _fetch_all(self, chat: Chat) -> list[bytes]:
        """One for each address; empty where an image came along."""
        pairs = list(zip(chat.addresses, chat.image_params, strict=True))
        if self._allows is None:
            first = next(param for address, param in pairs if address)
            message = "Addresses of images are not followed here; send data:image/png;base64,… "
            message += "instead, or start the server with --allow-image-urls."
            raise RequestError("image_url_refused", message, first)
        images: list[bytes] = []
        network = _Network(self._allows, self._threads)
        async with (
            self._turn(),
            httpcore.AsyncConnectionPool(network_backend=network, retries=0) as pool,
        ):
            deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
            for address, param in pairs:
                room = self._most_bytes - sum(map(len, images))
                one = _One(pool, param, min(room, MAX_IMAGE_BYTES))
                images.append(await one.fetch(address, deadline) if address else b"")
        return images

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """RequestError if others, of this key or of all, take too long."""
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await held.enter_async_context(self._free_of_key[OWNER.get()])
                    await held.enter_async_context(self._free)
            except TimeoutError:
                message = f"The images of other requests took more than {_TIMEOUT_S:.0f} s to be "
                message += "fetched; try again later, or send them as data URIs."
                raise RequestError("server_overloaded", message, retry_after_s=_RETRY_S) from None
            yield


class _One:
    """The way to one image."""

    def __init__(self, pool: httpcore.AsyncConnectionPool, param: str, most_bytes: int) -> None:
        self._pool = pool
        self._param = param
        self._most_bytes = most_bytes

    async def fetch(self, address: str, deadline: float) -> bytes:
        """The image's bytes; RequestError if they cannot be had by then."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._follow(httpx.URL(address))
        except _Forbidden:
            message = "The image's address leads to a host that is not on the public internet; "
            message += "send the image as a data URI."
            raise RequestError("image_url_refused", message, self._param) from None
        except TimeoutError:
            raise self._failed(f"not within {_TIMEOUT_S:.0f} s") from None
        except (httpx.InvalidURL, UnicodeError, ValueError):
            raise self._failed("the address is not valid") from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError):
            raise self._failed("its host did not answer as it should") from None

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
        raise self._failed(f"it was moved more than {_REDIRECTS} times")

    def _failed(self, why: str) -> RequestError:
        message = f"The image could not be fetched: {why}. Send it as a data URI."
        return RequestError("image_fetch_failed", message, self._param)

    def _too_large(self) -> RequestError:
        message = f"The image has more than the {self._most_bytes} bytes that are taken; "
        message += "send a smaller one."
        return RequestError("image_too_large", message, self._param)
