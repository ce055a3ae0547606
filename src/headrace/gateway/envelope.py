"""What every answer has, whatever its route: a request id, and an error where code failed."""

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.errors import RequestError
from headrace.gateway.answers import refuse

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


class Envelope:
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
            await refuse(error)(scope, receive, send_with_id)
        except Exception:
            logger.exception("Request %s failed", request_id)
            if has_begun:
                raise
            failure = RequestError("internal_error", "The server failed on this request.")
            await refuse(failure)(scope, receive, send_with_id)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
