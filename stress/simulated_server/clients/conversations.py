"""Clients that end streams early: by a newer request, a cancel, a DELETE, or by leaving."""

import asyncio
import json

from detangle import choice, flip, randint, uniform

from headrace.intake.intake import CONVERSATION
from stress.simulated_server.clients.common import (
    CHAT,
    Backoff,
    Event,
    ask,
    is_later,
    post_until_accepted,
)
from stress.simulated_server.clients.dialects import DIALECTS, parse
from stress.simulated_server.clients.events import check, read_events, text_of
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

ENDS_S = 1.0
"""The time within which a healthy engine ends the sequences of a stream."""


def check_cut(world: World, request: Request, events: list[Event], code: str) -> None:
    """Check a stream that may have been cut with this code: its text begins the answer."""
    last = events[-1]
    if last["kind"] != "error" or last["code"] != code:
        check(world, request, events)
        return
    whole = request.answer(world.model.tokenizer).text
    text = text_of(events)
    assert whole.startswith(text), f"{request.key}: {text!r} does not begin {whole!r}"
    world.counts[f"streams ended as {code}"] += 1


def _moment() -> float:
    """Return a short time. Many answers take less than a quarter of a second."""
    return uniform(0.0, choice((0.1, 0.4, 3.0)))


async def replaces(world: World, request: Request) -> None:
    """Send a newer request of the same conversation: the running stream ends as replaced."""
    name = f"conversation/{request.key}"
    old_id = await post_until_accepted(world, request, conversation=name)
    reading = asyncio.create_task(read_events(world, request, old_id))
    await asyncio.sleep(_moment())
    newer = world.new_request()
    new_id = await post_until_accepted(world, newer, conversation=name)
    assert new_id != old_id, "a newer request got the older stream"
    check_cut(world, request, await reading, "replaced")
    await ask(world, "GET", f"/v1/stream?conv_id={name}&stream_id={old_id}", (404,))
    _, found = await ask(world, "GET", f"/v1/streams?conversation_id={name}")
    listed = [entry["stream_id"] for entry in json.loads(found)]
    assert listed == [new_id], f"{listed} instead of {new_id}"
    check(world, newer, await read_events(world, newer, new_id))


async def cancels(world: World, request: Request) -> None:
    """Cancel a stream at any time: it ends, and nothing follows the answer of the cancel."""
    conversation = f"conversation/{request.key}" if flip(0.3) else ""
    stream_id = await post_until_accepted(world, request, conversation=conversation)
    await asyncio.sleep(_moment())
    _, answer = await ask(world, "POST", f"/v1/streams/{stream_id}/cancel")
    state = json.loads(answer)
    assert state["state"] in ("cancelled", "finished", "failed"), f"{request.key}: {state}"
    events = await read_events(world, request, stream_id)
    last = events[-1]
    assert last["seq"] == state["last_seq"], f"{request.key}: {last} after {state}"
    check_cut(world, request, events, "cancelled")


async def deletes(world: World, request: Request) -> None:
    """Delete a stream at any time: it is gone for good, and its key is free."""
    name = f"conversation/{request.key}"
    stream_id = await post_until_accepted(world, request, conversation=name)
    await asyncio.sleep(_moment())
    target = choice((f"/v1/streams/{stream_id}", f"/v1/stream?conv_id={name}"))
    await ask(world, "DELETE", target, (204,))
    for _ in range(randint(1, 3)):
        await ask(world, "GET", f"/v1/streams/{stream_id}/events", (404,))
        await ask(world, "GET", f"/v1/stream?conv_id={name}", (404,))
        await asyncio.sleep(uniform(0.0, 5.0))
    world.counts["streams deleted"] += 1
    new_id = await post_until_accepted(world, request, conversation=name)
    assert new_id != stream_id, "a deleted stream came back"
    check(world, request, await read_events(world, request, new_id))


async def lingers(world: World, request: Request) -> None:
    """Leave before the first token and send the same request again, without a key."""
    linger_s = world.machine.config.streams.linger_s
    request = request.longer() if flip(0.8) else request
    # An equal request of another client could take the stream over.
    body = request.body(is_stream=True, user=request.key)
    first = await _begin_unnamed(world, body)
    first.close()
    await asyncio.sleep(uniform(0.0, 1.5 * linger_s))
    second = await _begin_unnamed(world, body)
    is_same = second.headers["x-stream-id"] == first.headers["x-stream-id"]
    assert is_same == ("x-stream-attached" in second.headers)
    # A new stream is correct too: the first stream ends early if another request has to wait.
    world.counts["lingering streams taken over"] += is_same
    try:
        parsed = parse(DIALECTS[0], await second.read())
    except Broken:
        return
    if parsed.code:
        assert is_later(world, parsed.code) or world.may_fail(parsed.code), (
            f"{request.key} failed without a reason: {parsed.code}"
        )
    elif parsed.is_done:
        world.compare(request, parsed.texts[0], parsed.reasons[0])


async def _begin_unnamed(world: World, body: object) -> Connection:
    """POST without a key until the server accepts."""
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", CHAT, {}, body)
            if await connection.begin() == 200:
                return connection
        except Broken:
            pass
        await backoff.pause()


async def leaves(world: World, request: Request) -> None:
    """Begin to read a stream without a key, and leave: the stream soon ends."""
    num_left = randint(0, 10)
    dialect = choice(DIALECTS)
    headers = {CONVERSATION: request.key} if flip(0.2) else {}
    request, answer = request.longer() if flip(0.8) else request, b""
    try:
        body = dialect.body(request, True)
        connection = connect(world.server, "POST", dialect.route, headers, body)
        status = await connection.begin()
        async for piece in connection.chunks():
            answer += piece
            num_left -= 1
            if num_left < 0:
                break
    except Broken:
        return
    world.faults.note("client: left")
    connection.close()
    if status == 200 and not headers and world.has_steady_engine:
        # Only a stream whose text has not begun waits for another reader.
        has_begun = bool(parse(dialect, answer).texts[0])
        linger_s = 0.0 if has_begun else world.machine.config.streams.linger_s
        await _check_abandoned(world, connection.headers["x-stream-id"], linger_s)


async def _check_abandoned(world: World, stream_id: str, linger_s: float) -> None:
    """Check that a stream without readers is not computed for longer than its linger time."""
    server, troubles = world.server, world.troubles()
    await asyncio.sleep(linger_s + ENDS_S)
    if server is not None and world.troubles() == troubles:
        live = [it.record.id for it in server.generation.streams if not it.ended.is_set()]
        assert stream_id not in live, f"{stream_id} is computed for nobody"
        world.counts["abandoned streams"] += 1
