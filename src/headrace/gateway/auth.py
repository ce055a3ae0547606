"""Who may enter: keys, and on a keyless loopback server the names it is called by."""

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.core.config import HttpConfig
from headrace.core.errors import RequestError

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Auth:
    """Looks at headers only, before a byte of the body is read."""

    def __init__(self, config: HttpConfig) -> None:
        self._digests = [_digest(key) for key in config.api_key]
        self._hosts = {host.lower() for host in config.allowed_host}
        # a foreign page cannot know a key, but it can point a name of its own at loopback
        self._checks_names = not self._digests and _is_loopback(config.host)
        self.is_open_to_all = not self._digests and not self._checks_names

    def check(self, headers: Headers) -> None:
        """RequestError `forbidden` or `invalid_api_key` for who may not enter."""
        if self._checks_names:
            self._check_name("Host", _hostname(f"//{headers.get('host', 'localhost')}"))
            if "origin" in headers:
                self._check_name("Origin", _hostname(headers["origin"]))
        if self._digests and not self._knows(headers):
            raise RequestError(
                "invalid_api_key",
                "No valid key; send one as Authorization: Bearer KEY or X-Api-Key: KEY.",
            )

    def owner(self, headers: Headers) -> str:
        """Whose streams this client may see: those of its key; without keys, everybody's."""
        if not self._digests:
            return ""
        return next(
            (_digest(key).hex()[:16] for key in _given(headers) if _digest(key) in self._digests),
            "",
        )

    def guard(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint behind this door."""

        async def guarded(request: Request) -> ASGIApp:
            self.check(request.headers)
            return await endpoint(request)

        return guarded

    def _check_name(self, header: str, name: str) -> None:
        if name not in self._hosts and not _is_loopback(name):
            raise RequestError(
                "forbidden",
                f"A server without keys serves local names only, and the {header} is another; "
                "give it a key, or name the host with --allowed-host.",
            )

    def _knows(self, headers: Headers) -> bool:
        # every key is compared, so that time tells nothing
        found = [
            hmac.compare_digest(_digest(key), known)
            for key in _given(headers)
            for known in self._digests
        ]
        return any(found)


def _given(headers: Headers) -> list[str]:
    """The keys that a client sends, by either header."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", "")]
    return [*given, bearer.strip()] if scheme.lower() == "bearer" else given


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
