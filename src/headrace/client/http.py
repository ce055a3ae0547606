"""Code that both clients share: defaults, URLs, API keys and response parsing."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.client.errors import Refused
from headrace.client.events import Tokens
from headrace.client.following import HttpRequest
from headrace_common.answer import Piece
from headrace_common.errors import ConfigError, RequestFailed, StreamFailed
from headrace_common.system.loopback import is_loopback

URL = "http://127.0.0.1:8000"
PATIENCE_S = 300.0
# The read timeout is as long as several heartbeats.
TIMEOUT = httpx.Timeout(30.0, connect=10.0, pool=None)
# A caller that leaves a stream does not wait long for a server that does not answer.
STOP_TIMEOUT = httpx.Timeout(10.0)
NOT_MADE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)
"""Exceptions if a connection could not be made."""
LOST = (*NOT_MADE, httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
"""Exceptions if a connection could not be made or was lost."""

OnTrouble = Callable[[str, float], None]
"""A callback that gets the reason and the number of seconds before each wait."""

_ROUTE = re.compile(r"/v1(/.*)?$")
_NO_HOST = re.compile(r"[\s\\<>^`{|}\"]|:$")
_ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


def bear(reason: str, pause_s: float) -> None:
    """Do nothing. This is the default for `on_trouble`."""


def to_address(url: str) -> str:
    """Return the server's root URL. Add a missing `http://`; remove `/v1` and any later path."""
    if not isinstance(url, str):
        raise ConfigError(f"url must be a string such as {URL}, not {url!r}.")
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(text)
        address = f"{parts.scheme}://{parts.netloc}"
        address += _ROUTE.sub("", parts.path).rstrip("/")
        host = httpx.URL(address).host
        is_one = parts.scheme in ("http", "https") and bool(host) and not host.isdecimal()
        is_one = is_one and parts.port != 0 and not _NO_HOST.search(parts.netloc)
    except (ValueError, httpx.InvalidURL):
        is_one = False
    if not is_one:
        raise ConfigError(f"{url!r} is not a server's address; write it as {URL}.")
    return address


def direct_transport(address: str) -> httpx.HTTPTransport | None:
    """Return a transport for a server on this machine, so that httpx uses no proxy."""
    return httpx.HTTPTransport() if is_loopback(httpx.URL(address).host) else None


def async_direct_transport(address: str) -> httpx.AsyncHTTPTransport | None:
    """Return such a transport for an AsyncClient."""
    return httpx.AsyncHTTPTransport() if is_loopback(httpx.URL(address).host) else None


def key_header(api_key: str | None) -> dict[str, str]:
    if not isinstance(api_key, str | None):
        raise ConfigError(f"api_key must be a string, not of type {type(api_key).__name__}.")
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("The API key has characters that a header cannot hold; copy it again.")
    return {"Authorization": f"Bearer {api_key}"}


def to_patience(seconds: float) -> float:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # `>=` is false for NaN.
    if not is_number or not seconds >= 0:
        raise ConfigError(f"patience_s must be a number of seconds, at least 0, not {seconds!r}.")
    return seconds


def closed() -> RequestFailed:
    return RequestFailed("client_closed", "The client was closed; make a new one.")


def reason_of(error: httpx.TransportError) -> str:
    """Describe a transport error. Name the server's address if no connection was made."""
    words = _ERROR_NUMBER.sub("", str(error)) or type(error).__name__
    if "peer closed" in words or "disconnected" in words:
        words = "closed by the other end"
    address = error.request.url.netloc.decode()
    if words.startswith("[SSL") and "CERTIFICATE" not in words:
        words = f"the server does not speak https; write http://{address}"
    return f"{address}: {words}" if isinstance(error, NOT_MADE) else words


def to_object(body: bytes) -> dict[str, Any]:
    """Parse an answer as a JSON object. Raises Refused if the answer is not a JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        raise Refused(
            200, "The answer is not JSON; this server is not Headrace.", "unknown"
        ) from None


def to_piece(event: Tokens, stream_id: str) -> Piece:
    reason = event.end.finish_reason if event.end else None
    return Piece.of((stream_id, event.choice), event.pieces, event.ids, reason)


def to_send(http: httpx.Client | httpx.AsyncClient, sent: HttpRequest) -> httpx.Request:
    timeout = httpx.Timeout(sent.timeout_s, connect=10.0, pool=None)
    return http.build_request(
        sent.method, sent.path, headers=sent.headers, content=sent.body, timeout=timeout
    )


def to_response(state: dict[str, Any]) -> dict[str, Any]:
    """Return the complete answer of an ended stream.

    Raises StreamFailed if the stream ended early.
    """
    if "response" in state:
        return dict(state["response"])
    error = state.get("error", {})
    message = error.get("message", "The stream has not ended.")
    raise StreamFailed(error.get("code", "unknown"), message)
