"""Who may enter: keys, and on a keyless loopback server the names it is called by."""

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.workers.job_line import OWNER
from headrace_common.config.settings import HttpConfig
from headrace_common.config.sources import read_keys
from headrace_common.errors import RequestError
from headrace_common.log_context import KEY_NAME

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Auth:
    """Looks at headers only, before a byte of the body is read.

    An admin key opens all that clients' keys open, and /manage and /metrics besides.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._hosts = {host.lower() for host in config.allowed_host}
        self._origins = set(config.allowed_origins)
        self._keys: dict[bytes, str] = {}  # names of clients' keys, by digest
        self._admins: dict[bytes, str] = {}
        self.reload()
        # a foreign page cannot know a key, but it can point a name of its own at loopback
        self._checks_names = not self._keys and _is_loopback(config.host)
        self.is_open_to_all = not self._keys and not self._checks_names

    @property
    def num_keys(self) -> int:
        """The number of clients' keys."""
        return len(self._keys)

    def reload(self) -> None:
        """Takes the files of keys as they are now; ConfigError, and no change, if one is bad."""
        config = self._config
        keys = _digests(config.api_key, config.api_key_file, "--api-key-file")
        own = (config.admin_key,) if config.admin_key else ()
        admins = _digests(own, config.admin_key_file, "--admin-key-file")
        self._keys, self._admins = keys, admins

    def check(self, headers: Headers) -> None:
        """RequestError `forbidden` or `invalid_api_key` if this client may not enter."""
        if self._checks_names:
            self._check_names(headers)
        if not self._keys:
            return
        known = self._keys | self._admins
        digest = _known(headers, known)
        if digest is None:
            raise _no_key("No valid key")
        _let_in(digest, known)

    def check_admin(self, headers: Headers) -> None:
        """Checks a request for what only the operator may do, such as /manage and /metrics."""
        if self._checks_names:
            self._check_names(headers)
        if not self._admins:
            if self._checks_names:
                return
            raise RequestError(
                "forbidden",
                "Beyond this machine, or with keys, this is for those with the admin key, and "
                "there is none; start the server with --admin-key or HEADRACE_ADMIN_KEY.",
            )
        digest = _known(headers, self._admins)
        if digest is not None:
            _let_in(digest, self._admins)
        elif _known(headers, self._keys) is not None:
            raise RequestError(
                "forbidden", "This takes the admin key, and a client's was sent; send the former."
            )
        else:
            raise _no_key("This takes the admin key, and no valid one was sent")

    def check_operator(self, headers: Headers) -> None:
        """Checks a request for what disturbs others: the admin key, where there are keys at all."""
        if self._keys or self._admins:
            self.check_admin(headers)
        else:
            self.check(headers)

    def check_page(self, headers: Headers) -> None:
        """Raise RequestError `forbidden` if the Origin is a page of another host.

        Used for WebSockets, which a browser lets any page read, and by `check_simple`.
        """
        origin = headers.get("origin")
        if origin is None or self._origins & {origin, "*"}:
            return
        name, own = _hostname(origin), _hostname(f"//{headers.get('host', '')}")
        if not name or (name not in (own, *self._hosts) and not _is_loopback(name)):
            raise RequestError(
                "forbidden",
                "This request was sent by a page of another host; allow its Origin with "
                "--allowed-origins.",
            )

    def check_simple(self, headers: Headers) -> None:
        """Check a request that a browser lets a page of any site send without a preflight.

        Such a page cannot know a key, so only a server without keys has to look at its Origin.
        """
        if not self._keys:
            self.check_page(headers)

    def sees_all(self, headers: Headers) -> bool:
        """Whether this client may see what others ask: with the admin key, or without keys."""
        return not self._keys or _known(headers, self._admins) is not None

    def owner(self, headers: Headers) -> str:
        """Whose streams this client may see: those of its key; without keys, everybody's."""
        if not self._keys:
            return ""
        digest = _known(headers, self._keys | self._admins)
        return _owner(digest) if digest else ""

    def guard(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, for clients with a key."""
        return _behind(self.check, endpoint)

    def guard_admin(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, for the admin key."""
        return _behind(self.check_admin, endpoint)

    def guard_operator(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, for the admin key where there are keys."""
        return _behind(self.check_operator, endpoint)

    def _check_names(self, headers: Headers) -> None:
        self._check_name("Host", _hostname(f"//{headers.get('host', 'localhost')}"))
        origin = headers.get("origin")
        if origin is not None and not self._origins & {origin, "*"}:
            self._check_name("Origin", _hostname(origin))

    def _check_name(self, header: str, name: str) -> None:
        if name not in self._hosts and not _is_loopback(name):
            raise RequestError(
                "forbidden",
                f"A server without keys serves local names only, and the {header} is another; "
                "give it a key, or name the host with --allowed-host.",
            )


def _behind(check: Callable[[Headers], None], endpoint: Endpoint) -> Endpoint:
    async def guarded(request: Request) -> ASGIApp:
        check(request.headers)
        return await endpoint(request)

    return guarded


def _digests(keys: tuple[str, ...], file: str | None, given_as: str) -> dict[bytes, str]:
    """The name of each key, or "", by its digest."""
    named = dict.fromkeys(keys, "")
    if file is not None:
        named |= read_keys(Path(file), given_as=given_as)
    return {_digest(key): name for key, name in named.items()}


def _known(headers: Headers, known: dict[bytes, str]) -> bytes | None:
    """The digest of the key that a client sends, if it is one of these."""
    # every key is compared, so that time tells nothing
    found = [
        digest
        for sent in map(_digest, _given(headers))
        for digest in known
        if hmac.compare_digest(sent, digest)
    ]
    return found[0] if found else None


def _let_in(digest: bytes, known: dict[bytes, str]) -> None:
    """Sets the key for which this task acts from now on."""
    KEY_NAME.set(known[digest])
    OWNER.set(_owner(digest))


def _owner(digest: bytes) -> str:
    return digest.hex()[:16]


def _no_key(what: str) -> RequestError:
    return RequestError(
        "invalid_api_key",
        f"{what}; send one as Authorization: Bearer KEY or X-Api-Key: KEY.",
    )


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
