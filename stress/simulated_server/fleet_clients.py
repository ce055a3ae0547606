"""Clients of a server with several models: each has a key, and names a model."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from detangle import choice, flip, randint, uniform

from stress.simulated_server.batch_clients import FORM, form_of
from stress.simulated_server.clients.dialects import RESPONSES, Parsed
from stress.simulated_server.downloads import HUB_MODELS
from stress.simulated_server.fleet_world import NAMES, QUOTA_BYTES, FleetWorld
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.operators import call
from stress.simulated_server.requests import Request
from stress.simulated_server.system import world_loop

CHAT = "/v1/chat/completions"


class GivesUp(Exception):
    """Raised if the server refuses a request for good, for a reason that the docs name."""


class FleetClient:
    """One client with a key. Each of its requests names a model."""

    def __init__(self, world: FleetWorld) -> None:
        self.world = world
        self.key: str = choice(world.keys or ("",))
        self.name = ""

    async def run(self) -> None:
        for _ in range(randint(1, 4)):
            await asyncio.sleep(uniform(0.0, 10.0))
            names = (*NAMES, *HUB_MODELS)
            self.name = choice(self.world.served_names() or names) if flip(0.7) else choice(names)
            kinds = (
                self.resumes,
                self.asks,
                self.streams,
                self.embeds,
                self.uploads,
                self.responds,
            )
            kind = choice((self.resumes, *kinds))
            try:
                await kind(self.world.new_request())
            except GivesUp as reason:
                self.world.counts[f"gives up: {reason}"] += 1
            if flip(0.3):
                await self.peeks()

    def send(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Connection:
        given = {"authorization": f"Bearer {self.key}", **(headers or {})}
        return connect(self.world.server, method, target, given, body)

    async def resumes(self, request: Request) -> None:
        """Start a stream that survives, and read its log until its end."""
        connection = await self._post(request, {"idempotency-key": request.key})
        stream_id = connection.headers["x-stream-id"]
        self.world.tell(f"{self.key}: {request.key} for {self.name} is {stream_id}")
        connection.close()
        self.world.streams.setdefault(self.key, []).append(stream_id)
        events = await self._events_of(stream_id)
        last = events[-1]
        if last["kind"] == "error":
            self._failed(last["code"], request)
        text = "".join(piece["text"] for it in events for piece in it.get("pieces", ()))
        self.world.compare(request, text, last["ends"][0]["finish_reason"])

    async def _events_of(self, stream_id: str) -> list[dict[str, Any]]:
        """Read a stream to its end, and resume after each break."""
        events: list[dict[str, Any]] = []
        while not (events and events[-1]["kind"] in ("finish", "error")):
            target = f"/v1/streams/{stream_id}/events"
            target += f"?after={len(events) - 1}" if events else ""
            try:
                connection = self.send("GET", target)
                if await self.world.in_time(connection, connection.begin()) == 200:
                    await self._read_events(connection, events)
                else:
                    await self._refused(connection)
            except Broken:
                await asyncio.sleep(1.0)
        return events

    async def _read_events(self, connection: Connection, events: list[dict[str, Any]]) -> None:
        num_left = randint(0, 40) if flip(0.3) else None
        async for kind, data in self._frames(connection):
            if "seq" not in data:
                continue
            assert data["seq"] == len(events), f"event {data['seq']} after {len(events) - 1}"
            events.append({"kind": kind, **data})
            if num_left is not None and len(events) > num_left:
                connection.close()
                raise Broken

    async def asks(self, request: Request) -> None:
        """Send a request without a key, and wait for the whole answer."""
        connection = await self._post(request, {}, is_stream=False)
        found = json.loads(await connection.read())["choices"][0]
        self.world.compare(request, found["message"]["content"], found["finish_reason"])

    async def streams(self, request: Request) -> None:
        """Read the stream of a request without a key. The server's end also ends the stream."""
        connection = await self._post(request, {})
        text, finish_reason = "", ""
        try:
            async for _, data in self._frames(connection):
                if "error" in data:
                    self._failed(data["error"]["code"], request)
                for it in data.get("choices", ()):
                    text += it["delta"].get("content") or ""
                    finish_reason = it["finish_reason"] or finish_reason
        except Broken:
            raise GivesUp("connection lost") from None
        self.world.compare(request, text, finish_reason)

    async def embeds(self, request: Request) -> None:
        """Embed texts, and compare the vectors with those of equal texts."""
        texts = [f"{request.seed % 7} {number % 3}" for number in range(randint(1, 12))]
        body = {"model": self.name, "input": texts}
        data: dict[str, Any] = {}
        while not data:
            begun = world_loop().time()
            try:
                connection = self.send("POST", "/v1/embeddings", body)
                if await connection.begin() == 200:
                    data = json.loads(await connection.read())
                    self._accepted(begun)
                else:
                    await self._refused(connection)
            except Broken:
                await asyncio.sleep(1.0)
        found = [it["embedding"] for it in data["data"]]
        assert len(found) == len(texts)
        for text, vector in zip(texts, found, strict=True):
            expected = self.world.vectors.setdefault(text, vector)
            assert vector == expected, f"{text}: {vector} instead of {expected}"
        assert len({str(it) for it in self.world.vectors.values()}) == len(self.world.vectors)
        self.world.counts["embeddings"] += len(texts)

    async def uploads(self, request: Request) -> None:
        """Upload files slowly and together: their sum never exceeds the quota of the key."""
        await asyncio.gather(*(self._upload(request) for _ in range(randint(2, 4))))
        files: list[dict[str, Any]] | None = None
        while files is None:
            try:
                connection = self.send("GET", "/v1/files")
                if await connection.begin() == 200:
                    files = json.loads(await connection.read())["data"]
                else:
                    await self._refused(connection)
            except Broken:
                await asyncio.sleep(1.0)
        total = sum(it["bytes"] for it in files)
        assert total <= QUOTA_BYTES, f"{self.key} has {total} bytes in {len(files)} files"
        self.world.counts["quotas of files"] += 1
        for file in files[: randint(0, len(files))]:
            with contextlib.suppress(Broken):
                await self.send("DELETE", f"/v1/files/{file['id']}").read()

    async def _upload(self, request: Request) -> None:
        await asyncio.sleep(uniform(0.0, 1.0))
        lines = request.content.encode() * (400 // len(request.content))
        with contextlib.suppress(Broken):
            connection = connect(
                self.world.server,
                "POST",
                "/v1/files",
                {
                    "authorization": f"Bearer {self.key}",
                    "content-type": f"multipart/form-data; boundary={FORM}",
                },
                form_of(lines),
                pause_s=uniform(0.0, 1.0),
            )
            answer = await connection.read()
            if connection.status not in (200, 429, 503):
                code = json.loads(answer)["error"]["code"]
                is_known = code in ("quota_exceeded", "invalid_api_key")
                assert is_known or self.world.may_fail(code), f"an upload failed: {answer!r}"

    async def responds(self, request: Request) -> None:
        """Continue a stored response a few times; the server shortens the conversation."""
        extra: dict[str, Any] = {
            "model": self.name,
            "store": True,
            "truncation": "auto",
            "context_management": [{"type": "compaction", "compact_threshold": choice((50, 1000))}],
        }
        for _ in range(randint(1, 3)):
            body = RESPONSES.body(request, False) | extra
            connection = await self._post(request, {}, body=body, route=RESPONSES.route)
            found = json.loads(await connection.read())
            # A summary of earlier items is an item of its own.
            output = [it for it in found.get("output", ()) if it["type"] == "message"]
            parsed = Parsed()
            parsed.take(found | {"output": output}, RESPONSES)
            if parsed.code:
                self._failed(parsed.code, request)
            self.world.compare(request, parsed.texts[0], parsed.reasons[0])
            self.world.counts["responses continued"] += "previous_response_id" in extra
            extra["previous_response_id"] = found["id"]
            request = self.world.new_request()

    async def peeks(self) -> None:
        """Try to read and to stop the streams of other keys."""
        for key in self.world.keys:
            ids = self.world.streams.get(key)
            if key == self.key or not ids:
                continue
            target = f"/v1/streams/{choice(ids)}"
            method, path = choice(
                (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", ""))
            )
            try:
                status, body = await call(self.world, method, target + path, None, self.key)
            except Broken:
                continue
            self.world.tell(f"{self.key}: {method} {target}{path} of {key}: {status}")
            # Deleting a stream is idempotent, also for a stream that does not exist.
            allowed = (404, 401, 429, 503) if method != "DELETE" else (404, 204, 401, 429, 503)
            assert status in allowed, f"{method} {path} of another key: {status} {body}"
            self.world.counts["looks at other keys' streams"] += 1

    async def _post(
        self,
        request: Request,
        headers: dict[str, str],
        is_stream: bool = True,
        body: Any = None,
        route: str = CHAT,
    ) -> Connection:
        """Send a chat, or another body, until the server accepts it."""
        body = body or request.body(is_stream, model=self.name)
        while True:
            begun = world_loop().time()
            try:
                connection = self.send("POST", route, body, headers)
                if await connection.begin() == 200:
                    self._accepted(begun)
                    if not headers or "x-stream-id" in connection.headers:
                        return connection
                    # The server still waits for the model, so the stream has no id yet.
                    connection.close()
                    await asyncio.sleep(1.0)
                    continue
                await self._refused(connection)
            except Broken:
                await asyncio.sleep(1.0)

    def _accepted(self, begun: float) -> None:
        server = self.world.server
        if server is not None:
            spans = self.world.accepted.setdefault((self.key, server.process.name), [])
            spans.append((begun, world_loop().time()))

    async def _refused(self, connection: Connection) -> None:
        """Wait before the next attempt, or give up. The server must have a reason to refuse."""
        error = json.loads(await connection.read())["error"]
        code, status = error["code"], connection.status
        if code == "model_not_found" and self.world.may_be_missing(self.name):
            raise GivesUp(code)
        if code == "invalid_api_key":
            assert self.world.faults.injected["operator: reloads keys"]
        elif code == "engine_failed":
            # The stream waits until its model is loaded again.
            await call(self.world, "POST", "/models/load", {"model": self.name}, self.key)
        elif status not in (429, 503):
            self._failed(code, None)
        wait_s = float(connection.headers.get("retry-after-ms", "1000")) / 1000
        await asyncio.sleep(min(10.0, max(0.1, wait_s)))

    def _failed(self, code: str, request: Request | None) -> None:
        """Give up because a request failed, if this run has a reason for the failure."""
        is_end = code in ("server_shutdown", "server_restarting")
        is_gone = code == "model_not_found" and self.world.may_be_missing(self.name)
        key = request.key if request else "request"
        # A continued conversation may be too long, also for its summary.
        is_long = code == "context_length_exceeded"
        is_allowed = is_end or is_gone or is_long or self.world.may_fail(code)
        assert is_allowed, f"{key} for {self.name} failed without a reason: {code}"
        raise GivesUp(code)

    async def _frames(self, connection: Connection) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the kind and the data of each server-sent event; never wait in silence."""
        rest, chunks = b"", connection.chunks()
        while True:
            try:
                piece = await self.world.in_time(connection, anext(chunks))
            except StopAsyncIteration:
                return
            *frames, rest = (rest + piece).split(b"\n\n")
            for frame in frames:
                lines = frame.split(b"\n")
                data = b"".join(it[6:] for it in lines if it.startswith(b"data: "))
                kind = next((it[7:] for it in lines if it.startswith(b"event: ")), b"")
                if data and data != b"[DONE]":
                    yield kind.decode(), json.loads(data)


async def asks_models(world: FleetWorld) -> None:
    await FleetClient(world).run()


async def waits(world: FleetWorld) -> None:
    """Keep the run going, so that operators do more."""
    await asyncio.sleep(uniform(0.0, 120.0))
