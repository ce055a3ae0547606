"""Checks API keys. On a local server without keys, also checks the Host and Origin headers."""

import hashlib
import hmac
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers

from headrace.workers.job_queue import OWNER
from headrace_common.config.settings import HttpConfig
from headrace_common.config.sources import read_keys
from headrace_common.errors import RequestError
from headrace_common.log_context import KEY_NAME
from headrace_common.system.loopback import is_loopback
from headrace_common.worker_jobs import CheckedBody


class Auth:
    """Checks a request by its headers alone, before a byte of the body is read.

    A client's key opens the API. An admin key opens the API, /manage and /metrics.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._hosts = {host.lower() for host in config.allowed_host}
        self._origins = set(config.allowed_origins)
        # Maps the digest of each client's key to the key's name.
        self._keys: dict[bytes, str] = {}
        self._admins: dict[bytes, str] = {}
        self.reload()
        # A page of another site cannot know a key. But with DNS rebinding, such a page can reach
        # the loopback address under a foreign host name. So a local server without keys checks
        # Host and Origin.
        self._checks_names = not self._keys and is_loopback(config.host)
        self.is_open_to_all = not self._keys and not self._checks_names

    @property
    def num_keys(self) -> int:
        """Counts the keys of clients; admin keys do not count."""
        return len(self._keys)

    def reload(self) -> None:
        """Read the key files again; on ConfigError, the old keys stay."""
        config = self._config
        keys = _digests(config.api_key, config.api_key_file, "--api-key-file")
        own = (config.admin_key,) if config.admin_key else ()
        admins = _digests(own, config.admin_key_file, "--admin-key-file")
        self._keys, self._admins = keys, admins

    def check(self, headers: Headers) -> None:
        """Raise RequestError `forbidden` or `invalid_api_key` if this client has no access."""
        if self._checks_names:
            self._check_names(headers)
        if not self._keys:
            return
        known = self._keys | self._admins
        digest = _find_key(headers, known)
        if digest is None:
            raise _no_key("The request has no valid key; send one")
        _set_owner(digest, known)

    def check_admin(self, headers: Headers) -> None:
        """Raise RequestError if this client may not use an operator's route, such as /manage."""
        if self._checks_names:
            self._check_names(headers)
        if not self._admins:
            if self._checks_names:
                return
            raise RequestError(
                "forbidden",
                "This route needs an admin key, and the server has none; start it with --admin-key "
                "or HEADRACE_ADMIN_KEY.",
            )
        digest = _find_key(headers, self._admins)
        if digest is not None:
            _set_owner(digest, self._admins)
        elif _find_key(headers, self._keys) is not None:
            raise RequestError(
                "forbidden",
                "This route needs the admin key; the request carried a client key.",
            )
        else:
            raise _no_key("This route needs the admin key; send it")

    def check_operator(self, headers: Headers) -> None:
        """Raise RequestError if this client may not use a route that affects other clients.

        If the server has any keys, such a route needs the admin key.
        """
        if self._keys or self._admins:
            self.check_admin(headers)
        else:
            self.check(headers)

    def check_page(self, headers: Headers) -> None:
        """Raise RequestError `forbidden` if the Origin header names a page of another host.

        A browser lets any page open a WebSocket and read from the WebSocket. So every WebSocket
        is checked. `check_simple` uses this check too.
        """
        origin = headers.get("origin")
        if origin is None or self._origins & {origin, "*"}:
            return
        name, own = _hostname(origin), _hostname(f"//{headers.get('host', '')}")
        if not name or (name not in (own, *self._hosts) and not is_loopback(name)):
            raise RequestError(
                "forbidden",
                "A page of another host sent this request; allow its Origin with "
                "--allowed-origins.",
            )

    def check_simple(self, headers: Headers) -> None:
        """Check a CORS simple request, which a browser sends for any page without a preflight.

        A page of another site cannot know a key. So only a server without keys has to check the
        Origin header.
        """
        if not self._keys:
            self.check_page(headers)

    def sees_all(self, headers: Headers) -> bool:
        """Return whether this client may see all requests.

        If the server has keys for clients, only an admin key may see all requests.
        """
        return not self._keys or _find_key(headers, self._admins) is not None

    def limit_priority(self, headers: Headers, checked: CheckedBody) -> CheckedBody:
        """Return the body without a negative priority, unless an admin key sent the request.

        A negative priority puts a request before the requests of other keys. The removed field is
        reported as ignored.
        """
        if checked.fields.get("priority", 0) >= 0 or self.sees_all(headers):
            return checked
        fields = {**checked.fields, "priority": 0}
        return msgspec.structs.replace(
            checked, fields=fields, ignored=(*checked.ignored, "priority")
        )

    def owner(self, headers: Headers) -> str:
        """Return the id of the key whose streams this client may see; "" if the server has no
        keys.

        Raises RequestError `invalid_api_key` if the key was removed since `check`.
        """
        if not self._keys:
            return ""
        digest = _find_key(headers, self._keys | self._admins)
        if digest is None:
            raise _no_key("The key of this request was removed; send a valid key")
        return _owner(digest)

    def _check_names(self, headers: Headers) -> None:
        self._check_name("Host", _hostname(f"//{headers.get('host', 'localhost')}"))
        origin = headers.get("origin")
        if origin is not None and not self._origins & {origin, "*"}:
            self._check_name("Origin", _hostname(origin))

    def _check_name(self, header: str, name: str) -> None:
        if name not in self._hosts and not is_loopback(name):
            raise RequestError(
                "forbidden",
                f"The {header} header names a host that is not local, and this server has no keys; "
                "start it with --api-key, or allow the host with --allowed-host.",
            )


def _digests(keys: tuple[str, ...], file: str | None, given_as: str) -> dict[bytes, str]:
    """Map the digest of each key to the key's name, or to "" for a key without a name."""
    named = dict.fromkeys(keys, "")
    if file is not None:
        named |= read_keys(Path(file), given_as=given_as)
    return {_digest(key): name for key, name in named.items()}


def _find_key(headers: Headers, known: dict[bytes, str]) -> bytes | None:
    """Return the digest of the request's key; None if the request carries no known key."""
    # Compare every key, so that the duration of the search reveals nothing about the keys.
    found = [
        digest
        for sent in map(_digest, _sent_keys(headers))
        for digest in known
        if hmac.compare_digest(sent, digest)
    ]
    return found[0] if found else None


def _set_owner(digest: bytes, known: dict[bytes, str]) -> None:
    """Set the key's name and owner for the rest of the current task."""
    KEY_NAME.set(known[digest])
    OWNER.set(_owner(digest))


def _owner(digest: bytes) -> str:
    return digest.hex()[:16]


def _no_key(what: str) -> RequestError:
    return RequestError(
        "invalid_api_key",
        f"{what} as Authorization: Bearer KEY or X-Api-Key: KEY.",
    )


def _sent_keys(headers: Headers) -> list[str]:
    """Return the keys that the request carries in X-Api-Key and Authorization."""
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
