"""The gateway as one ASGI application: which path leads where, and for whom."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route, WebSocketRoute

from headrace.config.settings import ServerConfig
from headrace.gateway.auth import Auth, Endpoint
from headrace.gateway.bodies import Bodies
from headrace.gateway.byte_routes import ByteRoutes
from headrace.gateway.generation_routes import GenerationRoutes, TextRoutes
from headrace.gateway.http_responses import ErrorBoundary, no_socket, no_such_route
from headrace.gateway.llama_routes import LlamaRoutes
from headrace.gateway.loop_slices import BodyIndex
from headrace.gateway.middleware import PathPrefix, cross_origin
from headrace.gateway.model_routes import ModelRoutes
from headrace.gateway.native_routes import NativeRoutes
from headrace.gateway.realtime import RealtimeSockets
from headrace.gateway.responses_routes import ResponsesRoutes
from headrace.gateway.state_routes import ManageRoutes, StateRoutes
from headrace.gateway.vector_routes import VectorRoutes
from headrace.gateway.web_routes import web_routes
from headrace.generation.generation import Generation
from headrace.protocols.dialect import DIALECTS


def create_app(generation: Generation, config: ServerConfig, auth: Auth | None = None) -> Starlette:
    """All routes over one generation, whose life is the caller's; `auth` may be reloaded."""
    auth = auth or Auth(config.http)
    app = Starlette(
        routes=[
            *_of_everybody(StateRoutes(generation, config.http)),
            *_of_operators(generation, config, auth),
            *_of_clients(generation, config, auth),
            WebSocketRoute("/{path:path}", no_socket),
        ],
        middleware=[
            Middleware(PathPrefix, prefix=config.http.api_prefix),
            *cross_origin(config.http.allowed_origins),
            Middleware(ErrorBoundary, figures=generation.metrics.server),
        ],
        exception_handlers={HTTPException: no_such_route},
    )
    app.router.redirect_slashes = False
    return app


def _of_clients(generation: Generation, config: ServerConfig, auth: Auth) -> list[BaseRoute]:
    """The routes behind the clients' keys."""
    bodies = Bodies(config.http.max_body_bytes, config.http.body_timeout_s)
    generates = GenerationRoutes(generation, config, auth, bodies)
    states = StateRoutes(generation, config.http)
    texts = TextRoutes(generation, bodies)
    index = BodyIndex()
    responses = ResponsesRoutes(generation, config, auth, bodies)
    native = NativeRoutes(generation, config, auth, index)
    by_byte = ByteRoutes(generation, config, auth, bodies, index)
    sockets = RealtimeSockets(generation, config, auth, bodies, generates)
    models = ModelRoutes(generation, bodies)
    llama = LlamaRoutes(generation, auth)
    reads: dict[str, Endpoint] = {
        "/models": models.models,
        "/v1/models": states.models,
        "/v1/models/{id:path}": states.model,
        "/props": llama.props,
        "/slots": llama.slots,
        "/tokenizer_info": llama.tokenizer_info,
        "/v1/responses/{id}": responses.read,
        "/v1/responses/{id}/input_items": responses.input_items,
        "/v1/streams/{id}": native.state,
        "/v1/streams/{id}/events": native.events,
        "/v1/stream": by_byte.read,
        "/v1/stream/{id:path}": by_byte.read,
        "/openapi.json": states.openapi,
    }
    writes: dict[str, Endpoint] = {
        "/models/load": models.load,
        **dict.fromkeys(DIALECTS, generates.generate),
        **VectorRoutes(generation, auth, bodies).endpoints(),
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
    socket = WebSocketRoute("/v1/realtime-text", sockets.serve)
    unload = _routes(auth.guard_operator, POST={"/models/unload": models.unload})
    return [socket, *unload, *_routes(auth.guard, GET=reads, POST=writes, DELETE=deletes)]


def _of_everybody(states: StateRoutes) -> list[Route]:
    """The routes that need no key."""
    health = [Route(path, states.health) for path in ("/health", "/v1/health")]
    return [*health, Route("/health/live", states.live), *web_routes()]


def _of_operators(generation: Generation, config: ServerConfig, auth: Auth) -> list[Route]:
    """The routes behind the admin key."""
    manages = ManageRoutes(generation)
    bodies = Bodies(config.http.max_body_bytes, config.http.body_timeout_s)
    models = ModelRoutes(generation, bodies)
    reads: dict[str, Endpoint] = {
        "/metrics": StateRoutes(generation, config.http).metrics,
        "/manage/state": manages.state,
        "/manage/stream": manages.stream,
        "/manage/desired": models.desired,
    }
    acts: dict[str, Endpoint] = {
        "/manage/drain": manages.drain,
        "/manage/replicas/replace": manages.replace,
    }
    puts: dict[str, Endpoint] = {"/manage/desired": models.put_desired}
    deletes: dict[str, Endpoint] = {"/manage/drain": manages.admit_again}
    return _routes(auth.guard_admin, GET=reads, PUT=puts, POST=acts, DELETE=deletes)


def _routes(guard: Callable[[Endpoint], Endpoint], **by_method: dict[str, Endpoint]) -> list[Route]:
    return [
        Route(path, guard(endpoint), methods=[method])
        for method, endpoints in by_method.items()
        for path, endpoint in endpoints.items()
    ]
