"""Routes of OpenAI's Conversations API: conversations and their items."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.request_bodies import Bodies, CountedAnswer
from headrace.gateway.responses_routes import page_query
from headrace.intake.conversations import Conversations
from headrace_common.worker_jobs import UseConversation


class ConversationRoutes:
    def __init__(self, conversations: Conversations, auth: Auth, bodies: Bodies) -> None:
        self._conversations = conversations
        self._auth = auth
        self._bodies = bodies

    async def create(self, request: Request) -> ASGIApp:
        async with self._bodies.read(request) as body:
            creating = self._conversations.create(self._owner(request), b"".join(body))
            return _json(await unless_left(request.receive, creating))

    async def read(self, request: Request) -> ASGIApp:
        return await self._use(request, UseConversation(what="show", id=_id(request)))

    async def update(self, request: Request) -> ASGIApp:
        return await self._change(request, UseConversation(what="update", id=_id(request)))

    async def delete(self, request: Request) -> ASGIApp:
        id = _id(request)
        await self._conversations.delete(self._owner(request), id)
        return answer({"id": id, "object": "conversation.deleted", "deleted": True})

    async def list(self, request: Request) -> ASGIApp:
        limit, is_rising, after = page_query(request)
        job = UseConversation(
            what="list", id=_id(request), limit=limit, is_rising=is_rising, after=after
        )
        return await self._use(request, job)

    async def add(self, request: Request) -> ASGIApp:
        return await self._change(request, UseConversation(what="add", id=_id(request)))

    async def item(self, request: Request) -> ASGIApp:
        item = request.path_params["item"]
        return await self._use(request, UseConversation(what="item", id=_id(request), item=item))

    async def remove(self, request: Request) -> ASGIApp:
        """Remove an item, and return the conversation."""
        item = request.path_params["item"]
        return await self._use(request, UseConversation(what="remove", id=_id(request), item=item))

    async def _change(self, request: Request, job: UseConversation) -> ASGIApp:
        async with self._bodies.read(request) as body:
            changing = self._conversations.use(self._owner(request), job, b"".join(body))
            return _json(await unless_left(request.receive, changing))

    async def _use(self, request: Request, job: UseConversation) -> ASGIApp:
        using = self._conversations.use(self._owner(request), job)
        return CountedAnswer(await unless_left(request.receive, using), self._bodies)

    def _owner(self, request: Request) -> str:
        return self._auth.owner(request.headers)


def _id(request: Request) -> str:
    id: str = request.path_params["id"]
    return id


def _json(body: bytes) -> ASGIApp:
    return Response(body, media_type="application/json")
