"""Opens the socket that a server listens on, or explains why the socket cannot be opened."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from headrace_common.config.settings import HttpConfig
from headrace_common.errors import ConfigError

_HEALTH_TIMEOUT_S = 1.0
_MAX_TRIED_PORTS = 20
_LONGEST_LINE = 160
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}


class Neighbour(NamedTuple):
    """A Headrace server that already listens on the port."""

    url: str
    state: str
    is_healthy: bool


def listen(http: HttpConfig) -> socket.socket:
    """Listen on an address.

    `::` accepts clients over both IPv6 and IPv4 where the system allows both. Raises OSError if the
    address is in use, not allowed, or not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    is_dual = http.host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (http.host, http.port), family=family, backlog=2048, dualstack_ipv6=is_dual
    )


def no_listener(http: HttpConfig, error: OSError) -> ConfigError:
    """Explain why the address cannot be used, and which flag to change."""
    # A failed name lookup has a number outside `errno`.
    is_known = error.errno in errno.errorcode
    why = os.strerror(error.errno or 0) if is_known else error.strerror
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(f"--port: {http.port} cannot be used ({why}); choose a port above 1023.")
    return ConfigError(
        f"--host: {http.host} cannot be used ({why}); choose an address of this machine, "
        "such as 127.0.0.1, or 0.0.0.0 for all its addresses."
    )


def port_in_use(http: HttpConfig, models: Sequence[str] = ()) -> str:
    """Return a line that names the program on the port and a port that is free.

    `models` are the models that the user named; the suggested command names them too.
    """
    free = f"--port {_free_port(http)}"
    has = "is in use by another program"
    if (neighbour := find_neighbour(http)) is not None:
        has = f"already has a Headrace server ({neighbour.url})"
    line = f"port {http.port} {has}; stop it, or choose another port: {free}"
    longer = f'{line} (make serve ARGS="{" ".join((*models, free))}")'
    return longer if len(longer) <= _LONGEST_LINE - len("headrace: ") else line


def _free_port(http: HttpConfig) -> int:
    """Return the next free port. If the next ports are in use, return 0, which means any port."""
    for port in range(http.port + 1, min(http.port + _MAX_TRIED_PORTS, 1 << 16)):
        with contextlib.suppress(OSError), listen(replace(http, port=port)):
            return port
    return 0


def find_neighbour(http: HttpConfig) -> Neighbour | None:
    """Return the Headrace server that answers on this port within a second, or None."""
    host = _LOCAL.get(http.host, http.host)
    scheme = "https" if http.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{http.port}{http.api_prefix}"
    return asyncio.run(_ask(url))


async def _ask(url: str) -> Neighbour | None:
    import httpx

    # Otherwise httpx would write this request to a starting server's own log.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        # The timeout of httpx limits each read; this timeout limits the whole answer.
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            # The certificate may name another host or have an unknown issuer.
            async with httpx.AsyncClient(verify=False, trust_env=False) as client:
                answer = await client.get(f"{url}/health")
        health = answer.json()
        # Other servers answer with a status alone, or with an error alone.
        is_headrace = "status" in health and ("last_step_age_s" in health or "error" in health)
        if not is_headrace:
            return None
        return Neighbour(url, str(health["status"]), answer.is_success)
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
        return None


def address_of(listener: socket.socket) -> str:
    """Return the host and the port in the form that a URL uses."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
