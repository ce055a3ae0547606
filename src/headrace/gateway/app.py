"""The gateway as one ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route, WebSocketRoute

from headrace.batches.folder import temporary_shelf
from headrace.batches.shelf import Shelf
from headrace.gateway.auth import Auth
from headrace.gateway.http_responses import ErrorBoundary, no_socket, no_such_route
from headrace.gateway.middleware import CanonicalPath, PathPrefix, cross_origin
from headrace.gateway.routes import ROUTES, Endpoints
from headrace.gateway.web_routes import web_routes
from headrace.generation.generation import Generation
from headrace_common.config.settings import ServerConfig


def create_app(
    generation: Generation,
    config: ServerConfig,
    auth: Auth | None = None,
    shelf: Shelf | None = None,
) -> Starlette:
    """The routes over one generation, whose life is the caller's; `auth` may be reloaded.

    `shelf` has its batches, which are worked on while `app.state.batches.run()` runs; without one
    they do not survive the process.
    """
    auth = auth or Auth(config.http)
    endpoints = Endpoints(generation, config, auth, shelf or temporary_shelf())
    app = Starlette(
        routes=[
            *(
                Route(row.path, row.guard(auth, row.endpoint(endpoints)), methods=[row.method])
                for row in ROUTES
            ),
            *web_routes(),
            WebSocketRoute("/v1/realtime-text", endpoints.sockets.serve),
            WebSocketRoute("/{path:path}", no_socket),
        ],
        middleware=[
            Middleware(PathPrefix, prefix=config.http.api_prefix),
            Middleware(CanonicalPath),
            *cross_origin(config.http.allowed_origins),
            Middleware(
                ErrorBoundary,
                figures=generation.metrics.server,
                traces=generation.metrics.traces,
            ),
        ],
        exception_handlers={HTTPException: no_such_route},
    )
    app.router.redirect_slashes = False
    app.state.batches = endpoints.later.work
    return app
