"""The gateway as one ASGI application: which path leads where, and through which door."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from headrace.core.config import ServerConfig
from headrace.gateway.door import Door, Endpoint
from headrace.gateway.envelope import Envelope
from headrace.gateway.generation_routes import GenerationRoutes
from headrace.gateway.refusals import no_such_route
from headrace.gateway.state_routes import StateRoutes
from headrace.gateway.text_routes import TextRoutes
from headrace.generation.generation import Generation


def create_app(generation: Generation, config: ServerConfig) -> Starlette:
    """All routes over one generation, whose life is the caller's."""
    door = Door(config.http)
    generates = GenerationRoutes(generation, config)
    states = StateRoutes(generation)
    texts = TextRoutes(generation, config.http.max_body_bytes)
    routes = [
        Route("/health", states.health),
        Route("/v1/health", states.health),
        Route("/health/live", states.live),
        *_guarded(
            door,
            "GET",
            {
                "/v1/models": states.models,
                "/v1/models/{id:path}": states.model,
                "/props": states.props,
            },
        ),
        *_guarded(
            door,
            "POST",
            {
                "/v1/chat/completions": generates.chat,
                "/v1/completions": generates.completions,
                "/tokenize": texts.tokenize,
                "/detokenize": texts.detokenize,
                "/apply-template": texts.apply_template,
            },
        ),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Envelope)],
        exception_handlers={HTTPException: no_such_route},
    )
    app.router.redirect_slashes = False
    return app


def _guarded(door: Door, method: str, endpoints: dict[str, Endpoint]) -> list[Route]:
    return [
        Route(path, door.guard(endpoint), methods=[method]) for path, endpoint in endpoints.items()
    ]
