"""Clients of a cluster: each request may go to another gateway."""

import asyncio
import json
from typing import Any

from detangle import choice, randint, uniform

from stress.simulated_server.clients import KINDS, asks_for_a_while
from stress.simulated_server.clients.adapters import uses_an_adapter
from stress.simulated_server.clients.common import Backoff, code_of
from stress.simulated_server.clients.conversations import lingers
from stress.simulated_server.clients.events import add, log_events
from stress.simulated_server.clients.fairness import asks_beside_many
from stress.simulated_server.cluster import ClusterWorld
from stress.simulated_server.http import CLIENT_KEYS, Broken, Connection, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

BUSY = (429, 503)
# These clients look at one server: its streams without a key, its queue, and its adapters.
_KINDS = [kind for kind in KINDS if kind not in (lingers, asks_beside_many, uses_an_adapter)]
_ENDS = ("finish", "error")
# The code of an event that `User.read` adds if a failover has lost the stream.
_LOST = "lost"
_ERRORS_OF_LOST = (_LOST, "internal_error", "stream_not_found")


class User:
    """Somebody with an API key, who repeats requests until they are answered."""

    def __init__(self, world: ClusterWorld, key: str) -> None:
        self.world, self.key = world, key

    def connect(self, method: str, target: str, body: Any = None, **headers: str) -> Connection:
        given = {"authorization": f"Bearer {self.key}", **headers}
        return connect(self.world.server, method, target, given, body)

    async def ask(self, method: str, target: str, body: Any = None, **headers: str) -> Any:
        """Repeat a request until a gateway answers it; return the status and the body."""
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(120.0):
                    connection = self.connect(method, target, body, **headers)
                    found = await connection.read()
                if connection.status not in BUSY:
                    return connection.status, found
            except Broken:
                pass
            except TimeoutError:
                connection.close()
            await backoff.pause()

    def _may_fail(self, code: str) -> bool:
        """Return whether a request may get this error. The error does not name the stream."""
        is_lost = code in _ERRORS_OF_LOST and bool(self.world.redis.lost)
        self.world.counts["requests that failed after a failover"] += is_lost
        return is_lost or self.world.may_fail(code)

    async def begin(self, request: Request) -> str:
        """Create a stream, or find the stream with the request's key; return its id."""
        backoff = Backoff()
        headers = {"idempotency-key": request.key}
        while True:
            try:
                connection = self.connect(
                    "POST", "/v1/chat/completions", request.body(is_stream=True), **headers
                )
                async with asyncio.timeout(60.0):
                    status = await connection.begin()
                    if status == 200:
                        connection.close()
                        return connection.headers["x-stream-id"]
                    body = await connection.read()
                is_known = status in BUSY or self._may_fail(code_of(body))
                assert is_known, f"{request.key}: {status} {body!r}"
            except Broken:
                pass
            except TimeoutError:
                connection.close()
            await backoff.pause()

    async def read(self, stream_id: str) -> list[dict[str, Any]]:
        """Read a whole log; continue at another gateway after each break."""
        events: list[dict[str, Any]] = []
        backoff = Backoff()
        while not (events and events[-1]["kind"] in _ENDS):
            target = f"/v1/streams/{stream_id}/events"
            target += f"?after={len(events) - 1}" if events else ""
            try:
                connection = self.connect("GET", target)
                status = await self.world.in_time(connection, connection.begin())
                if status in (204, 400, 404) and self.world.has_lost(stream_id):
                    return [*events, {"kind": "error", "code": _LOST}]
                assert status in (200, *BUSY), f"{stream_id}: status {status}"
                if status != 200:
                    raise Broken
                await self._read_some(connection, stream_id, events)
            except Broken:
                await backoff.pause()
        return events

    async def _read_some(
        self, connection: Connection, stream_id: str, events: list[dict[str, Any]]
    ) -> None:
        world = self.world
        async for event in log_events(world, connection):
            add(events, event)
            before = world.seen.setdefault((stream_id, event["seq"]), event)
            if before != event and world.has_lost(stream_id):
                world.counts["events written again after a failover"] += 1
                world.seen[stream_id, event["seq"]] = event
                continue
            assert before == event, f"{stream_id}: {event} was {before}"

    def check(
        self, request: Request, stream_id: str, events: list[dict[str, Any]], *allowed: str
    ) -> None:
        """Compare a whole log with the reference; `allowed` are errors that may end it."""
        world, last = self.world, events[-1]
        if last["kind"] == "error":
            is_allowed = last["code"] in allowed or world.may_fail(last["code"])
            if not is_allowed and last["code"] in _ERRORS_OF_LOST:
                is_allowed = world.has_lost(stream_id) and not world.must_go_on(stream_id)
                world.counts["streams lost in a failover"] += is_allowed
            assert is_allowed, f"{request.key} failed without a reason: {last}"
            world.counts["allowed failures"] += 1
            return
        text = "".join(piece["text"] for event in events for piece in event.get("pieces", ()))
        world.counts["answers read across a failover"] += world.has_lost(stream_id)
        world.compare(request, text, last["ends"][0]["finish_reason"])


async def uses_the_cluster(world: World) -> None:
    """Do a few things, each as another kind of client."""
    assert isinstance(world, ClusterWorld)
    for _ in range(randint(1, 3)):
        await asyncio.sleep(uniform(0.0, 10.0))
        kind = choice((_reads_everywhere, _repeats, _stops_elsewhere, _shares_a_name))
        await kind(User(world, choice(CLIENT_KEYS)))


async def asks_gateways(world: World) -> None:
    """Run a client of the single server. Each of its requests may go to another gateway."""
    await asks_for_a_while(world, _KINDS)


async def _reads_everywhere(user: User) -> None:
    """Send a request to several gateways at once, and read its only stream at all of them."""
    request = user.world.new_request()

    async def once() -> str:
        stream_id = await user.begin(request)
        events = await user.read(stream_id)
        user.check(request, stream_id, events)
        if events[-1]["kind"] == "error":
            failed.add(stream_id)
        return stream_id

    failed: set[str] = set()
    ids = await asyncio.gather(*(once() for _ in range(randint(1, 3))))
    # A failed stream frees its key, so later requests get another one.
    num_whole = len({it for it in ids if it not in failed and not user.world.has_lost(it)})
    assert num_whole <= 1, f"{request.key} has the streams {ids}"
    other = User(user.world, next(key for key in CLIENT_KEYS if key != user.key))
    status, _ = await other.ask("GET", f"/v1/streams/{ids[0]}")
    assert status == 404, f"another key reads {ids[0]}: {status}"
    user.world.counts["streams hidden from other keys"] += 1


async def _repeats(user: User) -> None:
    """Repeat a request with a key until a whole answer arrives."""
    request = user.world.new_request()
    body, headers = request.body(is_stream=False), {"idempotency-key": request.key}
    status, found = await user.ask("POST", "/v1/chat/completions", body, **headers)
    answer = json.loads(found)
    if status != 200:
        code = answer["error"]["code"]
        assert user._may_fail(code), f"{request.key}: {status} {found!r}"
        user.world.counts["allowed failures"] += 1
        return
    choices = answer["choices"][0]
    user.world.compare(request, choices["message"]["content"], choices["finish_reason"])


async def _stops_elsewhere(user: User) -> None:
    """Stop a stream through any gateway; its log then ends soon, at all gateways."""
    request = user.world.new_request()
    stream_id = await user.begin(request)
    reading = asyncio.create_task(user.read(stream_id))
    await asyncio.sleep(uniform(0.0, 3.0))
    status, found = await user.ask("POST", f"/v1/streams/{stream_id}/cancel")
    is_gone = status == 404 and user.world.has_lost(stream_id)
    assert status == 200 or is_gone, f"{stream_id} cannot be stopped: {status} {found!r}"
    events = await reading
    user.check(request, stream_id, events, "cancelled")
    user.world.counts["streams stopped"] += 1


async def _shares_a_name(user: User) -> None:
    """Use the idempotency key of another user's request: each user gets their own answer."""
    one = user.world.new_request()
    two = user.world.new_request()._replace(key=one.key)
    users = [User(user.world, key) for key in CLIENT_KEYS]
    for own, request in zip(users, (one, two), strict=True):
        stream_id = await own.begin(request)
        own.check(request, stream_id, await own.read(stream_id))
