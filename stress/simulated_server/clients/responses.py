"""Clients of /v1/responses: in the background, stored, continued by number, and on a WebSocket."""

import asyncio
import contextlib
import json
from typing import Any

from detangle import flip, randint

from stress.simulated_server.clients.common import (
    Backoff,
    ask,
    is_later,
    post_until_accepted,
    read_frame,
)
from stress.simulated_server.clients.dialects import RESPONSES, Parsed, check, vary
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.websocket import open_socket
from stress.simulated_server.world import World

ROUTE = RESPONSES.route
ENDED = ("completed", "incomplete", "failed", "cancelled")


class ResponseReader:
    """Reads the events of one response, continuing behind the last number after each break."""

    def __init__(self, world: World, request: Request) -> None:
        self._world = world
        self._request = request
        self.parsed = Parsed()
        self.response_id = ""
        # The number of the last event that was applied.
        self._number = -1

    @property
    def has_ended(self) -> bool:
        return self.parsed.is_done or bool(self.parsed.code)

    def take(self, event: dict[str, Any]) -> None:
        """Apply one event. Numbers rise by one; a keepalive repeats the last number."""
        number = event["sequence_number"]
        if event["type"] == "keepalive":
            assert number == max(self._number, 0), f"keepalive {number} after {self._number}"
            return
        assert number == self._number + 1, f"event {number} after {self._number}"
        self._number = number
        self.response_id = event.get("response", {}).get("id", self.response_id)
        self.parsed.take(event, RESPONSES)

    async def follow(self) -> None:
        """Read the stored response to its end."""
        backoff = Backoff()
        while not self.has_ended:
            target = f"{ROUTE}/{self.response_id}?stream=true"
            if self._number >= 0:
                target += f"&starting_after={self._number}"
            try:
                await self._read(connect(self._world.server, "GET", target, {}))
            except Broken:
                await backoff.pause()

    async def _read(self, connection: Connection) -> None:
        status = await self._world.in_time(connection, connection.begin())
        if status != 200:
            answer = await connection.read()
            assert status in (429, 503), f"{self.response_id}: {status} {answer!r}"
            raise Broken
        num_left = randint(0, 20) if flip(0.3) else None
        rest, chunks = b"", connection.chunks()
        while True:
            try:
                rest += await self._world.in_time(connection, anext(chunks))
            except StopAsyncIteration:
                break
            *whole, rest = rest.split(b"\n\n")
            for frame in whole:
                self._take_frame(frame)
            if num_left is not None and (num_left := num_left - 1) < 0:
                self._world.faults.note("client: connection cut")
                connection.close()
                raise Broken
        if not self.has_ended:
            raise Broken

    def _take_frame(self, frame: bytes) -> None:
        data = read_frame(frame)[1]
        event = json.loads(data) if data else {}
        if "error" in event:
            # Only this connection ends.
            assert is_later(self._world, event["error"]["code"]), f"{event}"
            raise Broken
        if event:
            self.take(event)


async def keeps_a_response(world: World, request: Request) -> None:
    """Create a stored response, in the background or streamed; read it by its id."""
    request = vary(request, RESPONSES)
    is_background = flip(0.5)
    kept = {"background": True} if is_background else {"store": True}
    body = RESPONSES.body(request, not is_background) | kept
    reader = ResponseReader(world, request)
    reader.response_id = await post_until_accepted(world, request, ROUTE, body)
    if flip(0.5):
        await reader.follow()
        check(world, request, RESPONSES, reader.parsed)
    response = await _ended(world, reader.response_id)
    parsed = Parsed()
    parsed.take(response, RESPONSES)
    check(world, request, RESPONSES, parsed)
    world.counts["responses in the background" if is_background else "responses stored"] += 1


async def _ended(world: World, id: str) -> dict[str, Any]:
    """Return a response once it has ended."""
    while True:
        response: dict[str, Any] = json.loads((await ask(world, "GET", f"{ROUTE}/{id}"))[1])
        if response["status"] in ENDED:
            return response
        await asyncio.sleep(1.0)


async def refers_to_items(world: World, request: Request) -> None:
    """Refer to items of earlier responses by their ids; the new response has these items."""
    if world.expires:
        return
    items: list[dict[str, Any]] = []
    for number in range(randint(1, 3)):
        earlier = world.new_request()._replace(max_tokens=20)
        said = {"role": "user", "content": f"{earlier.key} said"}
        # A client may choose the id of an item.
        said |= {"id": f"item-{earlier.key}"} if number else {}
        items += await _items_of(world, earlier, [said])
    chosen = [it for it in items if flip(0.6)]
    references = [{"type": "item_reference", "id": it["id"]} for it in chosen]
    unknown = {"type": "item_reference", "id": "msg_of_nobody"}
    said = {"role": "user", "content": "And now?"}
    found = await _items_of(world, request._replace(max_tokens=20), [*references, unknown, said])
    kept = [text_of(it) for it in found if it.get("content")][: len(chosen) + 1]
    expected = [*map(text_of, chosen), "And now?"]
    assert not found or kept == expected, f"{kept} instead of {expected}"
    world.counts["items referred to"] += len(chosen)


async def _items_of(
    world: World, request: Request, asked: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the items of a new response, the input first; nothing if the response fails."""
    body = RESPONSES.body(request, False) | {"input": asked, "background": True}
    id = await post_until_accepted(world, request, ROUTE, body)
    response = await _ended(world, id)
    parsed = Parsed()
    parsed.take(response, RESPONSES)
    check(world, request, RESPONSES, parsed)
    _, page = await ask(world, "GET", f"{ROUTE}/{id}/input_items?order=asc&limit=100")
    listed: list[dict[str, Any]] = json.loads(page)["data"]
    return [*listed, *response["output"]] if parsed.is_done else []


def text_of(item: dict[str, Any]) -> str:
    """Return the text of a message."""
    content = item["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def answers_on_a_socket(world: World, request: Request) -> None:
    """Create responses one after another on a WebSocket; read them by id after a loss."""
    requests = [request, *(world.new_request() for _ in range(randint(0, 2)))]
    backoff = Backoff()
    while requests:
        readers = [ResponseReader(world, it) for it in requests]
        with contextlib.suppress(Broken):
            await _use_socket(world, requests, readers)
        for reader, it in zip(readers, [*requests], strict=True):
            if reader.response_id:
                await reader.follow()
                check(world, it, RESPONSES, reader.parsed)
                world.counts["responses on a socket"] += 1
                requests.remove(it)
        if requests:
            await backoff.pause()


async def _use_socket(world: World, requests: list[Request], readers: list[ResponseReader]) -> None:
    """Send all requests, and read their answers in order."""
    socket = open_socket(world.server, ROUTE)
    assert await world.in_time(socket, socket.begin()) == 101
    for request in requests:
        body = RESPONSES.body(request, True) | {"store": True}
        socket.send({"type": "response.create", **body})
    for reader in readers:
        while not reader.has_ended:
            event = await world.in_time(socket, socket.receive())
            if event["type"] == "error":
                code = event["error"]["code"]
                assert is_later(world, code) or world.may_fail(code), f"{event}"
                socket.close()
                raise Broken
            if reader.response_id or event["type"] != "keepalive":
                reader.take(event)
            if flip(0.01):
                world.faults.note("client: socket cut")
                socket.close()
                raise Broken
    socket.close()
