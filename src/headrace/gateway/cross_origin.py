"""Pages of other origins that may use the API: preflights, and headers that let them read."""

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headrace.gateway.answers import new_request_id

_READABLE = (
    "X-Request-Id",
    "X-Stream-Id",
    "X-Stream-Mode",
    "X-Stream-Attached",
    "X-Headrace-Ignored",
    "X-Should-Retry",
    "Retry-After",
    "Retry-After-Ms",
)


class CrossOrigin(CORSMiddleware):
    """Answers preflights before any key is asked for: a browser sends none with them."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.headers["X-Request-Id"] = new_request_id(request_headers)
        return response


def cross_origin(origins: tuple[str, ...]) -> list[Middleware]:
    """Nothing unless some are allowed. Cookies are never sent or taken."""
    if not origins:
        return []
    return [
        Middleware(
            CrossOrigin,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=_READABLE,
        )
    ]
