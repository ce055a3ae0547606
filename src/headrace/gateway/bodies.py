"""The strict door for bodies: a client's bytes become a dict, or the reason why they cannot.

Knows JSON and its limits; knows no field.
"""

import asyncio
import sys
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from headrace.core.errors import RequestError

MAX_DEPTH = 64
PAUSE_S = 20.0
_LARGEST = int(sys.float_info.max)
_CONTAINERS = (dict, list)


async def read_json(headers: Headers, receive: Receive, max_bytes: int) -> dict[str, Any]:
    """The object in the body; ClientDisconnect if the client left before the body was whole."""
    return decode(await read_body(headers, receive, max_bytes))


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The bytes of a body that says it is JSON."""
    _check_content_type(headers.get("content-type", ""))
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    return await _read(receive, max_bytes)


def decode(body: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8 without a byte order mark, finite numbers, no lone surrogate."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError("invalid_json", _reason(body, error)) from None
    if not isinstance(value, dict):
        raise RequestError("invalid_json", "The body must be a JSON object, such as {}.")
    _check_tree(value)
    return value


def _check_content_type(value: str) -> None:
    media, _, parameters = value.lower().partition(";")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "')
    if media.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise RequestError(
            "unsupported_media_type",
            "The body must be UTF-8 JSON; send the header Content-Type: application/json.",
        )


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    is_whole = False
    while not is_whole:
        try:
            async with asyncio.timeout(PAUSE_S):
                message = await receive()
        except TimeoutError:
            raise RequestError(
                "body_timeout", f"Nothing of the body came for {PAUSE_S:g} s; send it again."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        is_whole = not message.get("more_body", False)
    return bytes(body)


def _check_tree(root: dict[str, Any]) -> None:
    """Level by level, so that the depth costs no recursion."""
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            values = container.values() if type(container) is dict else container
            if any(type(x) is int and not -_LARGEST <= x <= _LARGEST for x in values):
                raise RequestError("invalid_json", "A number in the body is too large.")
            below += [x for x in values if type(x) in _CONTAINERS]
        if not below:
            return
        level = below
    raise _too_deep()


def _reason(body: bytes, error: ValueError) -> str:
    if body.startswith(b"\xef\xbb\xbf"):
        return "The body begins with a byte order mark; send plain UTF-8."
    if isinstance(error, UnicodeDecodeError):
        return "The body is not valid UTF-8."
    if isinstance(error, msgspec.ValidationError):
        return "A number in the body is too large."
    # the decoder's own words name a kind of fault and an offset, nothing else
    return f"The body is not valid JSON: {error}."


def _too_deep() -> RequestError:
    return RequestError("invalid_json", f"The body is nested deeper than {MAX_DEPTH} levels.")


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        "request_too_large",
        f"The body is larger than the {max_bytes} bytes that this server takes; "
        "send less, or raise --max-body-bytes.",
    )
