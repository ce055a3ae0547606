"""Clients that send damaged, hostile and compressed bodies."""

import gzip
import json
from collections.abc import Callable
from typing import Any

from detangle import choice, randint

from stress.simulated_server.clients.common import Backoff, code_of, is_later
from stress.simulated_server.clients.dialects import DIALECTS, Dialect, Parsed, check
from stress.simulated_server.http import Broken, connect
from stress.simulated_server.processes import MAX_MODEL_LEN
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

Damage = Callable[[dict[str, Any]], bytes]
GZIP = {"content-encoding": "gzip"}
LONG = "many words " * MAX_MODEL_LEN


def _cut(body: dict[str, Any]) -> bytes:
    whole = json.dumps(body).encode()
    return whole[: randint(0, len(whole) - 1)]


def _changed(body: dict[str, Any]) -> bytes:
    """Return the body with a value that no field accepts."""
    field = choice([name for name in body if name != "options"])
    value = choice(([[]], {"a": {}}, "\ud800", -(10**30)))
    # These fields have fixed types, so none of them accepts the value.
    return json.dumps(body | {field: value}).encode()


def _too_long(body: dict[str, Any]) -> bytes:
    """Return the body with a prompt that exceeds the context."""
    longer = {"prompt": LONG, "input": LONG, "messages": [{"role": "user", "content": LONG}]}
    return json.dumps({name: longer.get(name, value) for name, value in body.items()}).encode()


DAMAGES: tuple[Damage, ...] = (
    _cut,
    _changed,
    _too_long,
    lambda body: b"[" * randint(1, 20_000),
    lambda body: json.dumps(body).encode().replace(b":", b":\xff", 1),
    lambda body: json.dumps([body]).encode(),
    lambda body: json.dumps(body | {"model": "none"}).encode(),
)


async def sends_damaged_bodies(world: World, request: Request) -> None:
    """Send damaged bodies: each is refused with a reason, and the server keeps answering."""
    dialect = choice(DIALECTS)
    body = dialect.body(request, False)
    for _ in range(randint(1, 6)):
        data = choice(DAMAGES)(body)
        packed = gzip.compress(data)
        headers, sent = choice(
            (
                ({}, data),
                ({}, data),
                (GZIP, packed),
                (GZIP, packed[: randint(0, len(packed) - 1)]),
                (GZIP, data),
                ({"content-encoding": "br"}, data),
            )
        )
        await _is_refused(world, dialect.route, headers, sent)
    await _is_read(world, dialect, request, gzip.compress(json.dumps(body).encode()))


async def _is_refused(world: World, route: str, headers: dict[str, str], data: bytes) -> None:
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", route, headers, data)
            answer = await connection.read()
        except Broken:
            await backoff.pause()
            continue
        what = f"{route}: {connection.status} {answer!r} for {data[:200]!r}"
        assert connection.status != 200, what
        if connection.status in (400, 404, 413, 415):
            assert code_of(answer) and b"Traceback" not in answer, what
            world.counts["damaged bodies refused"] += 1
            return
        assert connection.status in (429, 503, 529) or world.may_fail(code_of(answer)), what
        await backoff.pause()


async def _is_read(world: World, dialect: Dialect, request: Request, data: bytes) -> None:
    """Send a compressed body until its answer arrives, and check the answer."""
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", dialect.route, GZIP, data)
            parsed = Parsed()
            parsed.take(json.loads(await connection.read()), dialect)
            if not (is_later(world, parsed.code) or connection.status in (429, 529)):
                check(world, request, dialect, parsed)
                world.counts["compressed bodies"] += 1
                return
        except Broken:
            pass
        await backoff.pause()
