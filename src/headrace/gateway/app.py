"""Assembles the gateway's routes and middleware into one ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.http_responses import ErrorBoundary, no_socket, no_such_route
from headrace.gateway.middleware import CanonicalPath, PathPrefix, cross_origin
from headrace.gateway.openapi import Endpoint, Guard
from headrace.gateway.routes import ROUTES, Endpoints
from headrace.gateway.web_routes import web_routes
from headrace.metrics.metrics import Metrics
from headrace_common.config.settings import HttpConfig


def create_app(endpoints: Endpoints, config: HttpConfig, auth: Auth, metrics: Metrics) -> Starlette:
    """Build the application from all routes, and put the required key check before each route.

    `auth` can read its keys again while the application runs.
    """
    app = Starlette(
        routes=[
            *(
                Route(
                    row.path,
                    _guarded(row.endpoint(endpoints), row.guard, auth),
                    methods=[row.method],
                )
                for row in ROUTES
            ),
            *web_routes(),
            WebSocketRoute("/v1/responses", endpoints.response_sockets.serve),
            WebSocketRoute("/v1/realtime-text", endpoints.sockets.serve),
            WebSocketRoute("/{path:path}", no_socket),
        ],
        middleware=[
            Middleware(PathPrefix, prefix=config.api_prefix),
            Middleware(CanonicalPath),
            *cross_origin(config.allowed_origins),
            Middleware(ErrorBoundary, figures=metrics.server, traces=metrics.traces),
        ],
        exception_handlers={HTTPException: no_such_route},
    )
    app.router.redirect_slashes = False
    return app


def _guarded(endpoint: Endpoint, guard: Guard, auth: Auth) -> Endpoint:
    if guard is None:
        return endpoint

    async def guarded(request: Request) -> ASGIApp:
        guard(auth, request.headers)
        return await endpoint(request)

    return guarded
