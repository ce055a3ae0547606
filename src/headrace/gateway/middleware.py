"""What every answer has, whatever its route: a request id, and an error where code failed."""

import asyncio
import contextlib
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.errors import RequestError
from headrace.gateway.answers import refuse
from headrace.gateway.delivery import notice_of
from headrace.streams.log import LogGone

logger = logging.getLogger(__name__)

_MAX_TAKEN, _TAKING_S = 1 << 20, 1.0  # of an upload that was refused
_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


class ErrorBoundary:
    """ASGI middleware; the outermost loop of a request, so nothing passes it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # left before the body was whole: there is nobody to answer
        except RequestError as error:
            is_upload = error.code == "request_too_large"
            last_send = _once_taken(receive, send_with_id) if is_upload else send_with_id
            await refuse(error)(scope, receive, last_send)
        except LogGone as gone:
            await refuse(notice_of(gone))(scope, receive, send_with_id)
        except Exception:
            logger.exception("Request %s failed", request_id)
            if has_begun:
                raise
            failure = RequestError("internal_error", "The server failed on this request.")
            await refuse(failure)(scope, receive, send_with_id)


def _once_taken(receive: Receive, send: Send) -> Send:
    """Ends the answer once the upload has, within bounds.

    A connection that is closed with bytes unread is reset, and the client may lose the answer.
    """

    async def take_rest() -> None:
        num_taken, is_whole = 0, False
        while not is_whole and num_taken < _MAX_TAKEN:
            message = await receive()
            num_taken += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(take_rest(), _TAKING_S)
            message = {**message, "body": b""}
        await send(message)

    return send_last


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
