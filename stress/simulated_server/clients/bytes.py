"""Readers of /v1/stream: the body of a POST's answer, continued at any byte."""

from detangle import choice, flip, randint

from stress.simulated_server.clients.common import Backoff, names_of, refused
from stress.simulated_server.clients.dialects import DIALECTS, check, parse, vary
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World


class ByteReader:
    """Reads one body in parts, which may overlap."""

    def __init__(self, world: World, request: Request) -> None:
        self._world = world
        self._dialect = choice(DIALECTS)
        self._request = vary(request, self._dialect)
        self._name = f"conversation/{request.key}"
        # An equal key needs an equal body.
        self._post_body = self._dialect.body(self._request, True)
        if flip(0.5):
            self._post_body["heartbeat"] = True
        self._body = b""
        self._stream_id = ""

    async def read(self) -> None:
        backoff = Backoff()
        while not self._is_whole():
            try:
                if not self._stream_id or flip(0.1):
                    await self._post()
                else:
                    await self._get(choice((len(self._body), randint(0, len(self._body)))))
            except Broken:
                await backoff.pause()
        check(self._world, self._request, self._dialect, parse(self._dialect, self._body))
        await self._read_again()

    def _is_whole(self) -> bool:
        parsed = parse(self._dialect, self._body)
        return parsed.is_done or bool(parsed.code)

    async def _post(self) -> None:
        """Send the request, which attaches to its stream, and read from the start."""
        route, names = self._dialect.route, names_of(self._request, self._name)
        connection = connect(self._world.server, "POST", route, names, self._post_body)
        status = await connection.begin()
        if status == 200:
            stream_id = connection.headers["x-stream-id"]
            if self._stream_id not in ("", stream_id):
                # The stream has failed since, so the key was free for a new stream.
                assert self._world.may_fail("engine_failed"), "the key has lost its stream"
                self._body = b""
            self._stream_id = stream_id
        await self._take(connection, status, 0)

    async def _get(self, offset: int) -> None:
        target = f"/v1/stream?conv_id={self._name}&from={offset}&stream_id={self._stream_id}"
        connection = connect(self._world.server, "GET", target, {})
        status = await self._world.in_time(connection, connection.begin())
        await self._take(connection, status, offset)

    async def _take(self, connection: Connection, status: int, offset: int) -> None:
        """Compare the bytes that are known, and keep those that are new."""
        if status != 200:
            await refused(self._world, connection)
            raise Broken
        num_left = randint(0, 3000) if flip(0.5) else None
        chunks = connection.chunks()
        while True:
            try:
                piece = await self._world.in_time(connection, anext(chunks))
            except StopAsyncIteration:
                break
            known = self._body[offset : offset + len(piece)]
            assert piece[: len(known)] == known, f"byte {offset}: {piece!r} instead of {known!r}"
            self._body += piece[len(known) :]
            offset += len(piece)
            if num_left is not None and (num_left := num_left - len(piece)) < 0:
                self._world.faults.note("client: connection cut")
                connection.close()
                raise Broken
        if not self._is_whole():
            raise Broken

    async def _read_again(self) -> None:
        """Read the whole body once more, from the start and from its end."""
        for offset in (0, len(self._body)):
            backoff = Backoff()
            while True:
                try:
                    before = parse(self._dialect, self._body)
                    await self._get(offset)
                    after = parse(self._dialect, self._body)
                    assert after == before, f"{after} instead of {before}"
                    break
                except Broken:
                    await backoff.pause()
        self._world.counts["bodies read by byte"] += 1


async def resumes_by_byte(world: World, request: Request) -> None:
    """Read a body by bytes; all connections together must give one body without a gap."""
    await ByteReader(world, request).read()
