"""The gateway as one ASGI application: which path leads where, and through which door."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from headrace.core.config import ServerConfig
from headrace.gateway.answers import ErrorBoundary, no_such_route
from headrace.gateway.auth import Auth, Endpoint
from headrace.gateway.bodies import Bodies
from headrace.gateway.byte_routes import ByteRoutes
from headrace.gateway.generation_routes import GenerationRoutes, TextRoutes
from headrace.gateway.long_logs import BodyIndex
from headrace.gateway.native_routes import NativeRoutes
from headrace.gateway.responses_routes import ResponsesRoutes
from headrace.gateway.state_routes import ManageRoutes, StateRoutes
from headrace.gateway.web_routes import web_routes
from headrace.generation.generation import Generation
from headrace.protocols.dialect import DIALECTS


def create_app(generation: Generation, config: ServerConfig) -> Starlette:
    """All routes over one generation, whose life is the caller's."""
    door = Auth(config.http)
    bodies = Bodies(config.http.max_body_bytes)
    generates = GenerationRoutes(generation, config, door, bodies)
    states = StateRoutes(generation)
    texts = TextRoutes(generation, bodies)
    index = BodyIndex()
    responses = ResponsesRoutes(generation, config, door, bodies)
    native = NativeRoutes(generation, config, door, index)
    by_byte = ByteRoutes(generation, config, door, bodies, index)
    manages = ManageRoutes(generation, door)
    reads: dict[str, Endpoint] = {
        "/v1/models": states.models,
        "/v1/models/{id:path}": states.model,
        "/props": states.props,
        "/metrics": states.metrics,
        "/v1/responses/{id}": responses.read,
        "/v1/responses/{id}/input_items": responses.input_items,
        "/v1/streams/{id}": native.state,
        "/v1/streams/{id}/events": native.events,
        "/v1/stream": by_byte.read,
        "/v1/stream/{id:path}": by_byte.read,
        "/openapi.json": states.openapi,
        "/manage/state": manages.state,
        "/manage/stream": manages.stream,
    }
    writes: dict[str, Endpoint] = {
        **dict.fromkeys(DIALECTS, generates.generate),
        "/v1/messages/count_tokens": texts.count_tokens,
        "/tokenize": texts.tokenize,
        "/detokenize": texts.detokenize,
        "/apply-template": texts.apply_template,
        "/v1/responses/input_tokens": responses.input_tokens,
        "/v1/responses/{id}/cancel": responses.cancel,
        "/v1/streams/lookup": by_byte.lookup,
        "/v1/streams/{id}/cancel": native.cancel,
    }
    deletes: dict[str, Endpoint] = {
        "/v1/responses/{id}": responses.delete,
        "/v1/streams/{id}": native.delete,
        "/v1/stream": by_byte.delete,
        "/v1/stream/{id:path}": by_byte.delete,
    }
    routes = [
        Route("/health", states.health),
        Route("/v1/health", states.health),
        Route("/health/live", states.live),
        *web_routes(),
        *(Route(path, door.guard(it), methods=["GET"]) for path, it in reads.items()),
        *(Route(path, door.guard(it), methods=["POST"]) for path, it in writes.items()),
        *(Route(path, door.guard(it), methods=["DELETE"]) for path, it in deletes.items()),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(ErrorBoundary)],
        exception_handlers={HTTPException: no_such_route},
    )
    app.router.redirect_slashes = False
    return app
