"""Clients of files and batches, in OpenAI's and Anthropic's API.

Each line of a batch has one result, and its answer is the reference's. Files and results that a
client has seen do not change or vanish, unless a failover of Redis has lost writes for them.
"""

import asyncio
import json
from contextvars import ContextVar
from typing import Any

from detangle import choice, flip, randint, uniform

from stress.simulated_server.clients.common import Backoff
from stress.simulated_server.clients.scores import answer_of
from stress.simulated_server.http import API_KEY, CLIENT_KEYS, Broken, connect
from stress.simulated_server.requests import MODEL, Request
from stress.simulated_server.world import World, Wrong

ROUTE = "/v1/chat/completions"
MESSAGES = "/v1/messages"
BATCHES = f"{MESSAGES}/batches"
PATIENCE_S = 120.0
"""The longest time until a request is answered. A stalled disk delays all of these requests."""
_LATER = (429, 503, 529)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_ENDED = ("completed", "cancelled", "failed", "expired")
FORM = "form-boundary"

Json = dict[str, Any]
# The paths that this client has used, and the answers that named other ids.
_USED: ContextVar[list[str]] = ContextVar("used")


async def uses_batches(world: World) -> None:
    """Send a batch, watch or cancel it, check its results, and delete its files."""
    API_KEY.set(choice(CLIENT_KEYS))
    await asyncio.sleep(uniform(0.0, 8.0))
    requests = {request.key: request for request in _requests(world)}
    use, listing = choice(
        (
            *((_openai, "/v1/batches"), (_anthropic, BATCHES)) * 2,
            (_embeds, "/v1/batches"),
            (_has_a_fault, "/v1/batches"),
        )
    )
    _USED.set([])
    try:
        await use(world, requests)
    except AssertionError as error:
        if isinstance(error, Wrong) or not world.has_lost(*_USED.get()):
            raise
        world.counts["batches that a failover has changed"] += 1
    await _all_end(world, listing)


def _requests(world: World) -> list[Request]:
    return [world.new_request() for _ in range(choice((1, 2, 5, 12)))]


async def call(
    world: World, method: str, target: str, body: Any = None, allowed: tuple[int, ...] = (200,)
) -> tuple[int, bytes]:
    """Repeat a request until its status is allowed. A form is sent as bytes."""
    backoff = Backoff()
    headers: dict[str, str] = {}
    if isinstance(body, bytes):
        headers["content-type"] = f"multipart/form-data; boundary={FORM}"
    while True:
        try:
            connection = connect(world.server, method, target, headers, body)
            answer = await world.in_time(connection, connection.read(), PATIENCE_S)
            _USED.get().append(f"{target} {answer.decode(errors='replace')}")
            if connection.status in allowed:
                return connection.status, answer
            if connection.status not in _LATER:
                is_error = connection.status >= 400
                code = json.loads(answer)["error"].get("code", "") if is_error else ""
                where = f"{method} {target}: {connection.status} {answer!r}"
                # A batch whose answer was lost may need the file, too.
                assert code == "file_in_use" or world.may_fail(code), where
        except Broken:
            pass
        await backoff.pause()


async def read(world: World, target: str) -> Json:
    _, answer = await call(world, "GET", target)
    found: Json = json.loads(answer)
    return found


async def _openai(world: World, requests: dict[str, Request]) -> None:
    lines = b"".join(
        json.dumps(
            {"custom_id": key, "method": "POST", "url": ROUTE, "body": request.body(False)}
        ).encode()
        + b"\n"
        for key, request in requests.items()
    )
    input_id = await _upload(world, lines)
    # An accepted file stays, with the bytes that were sent.
    assert (await read(world, f"/v1/files/{input_id}"))["bytes"] == len(lines)
    _, stored = await call(world, "GET", f"/v1/files/{input_id}/content")
    assert stored == lines, f"{input_id} has {stored!r} instead of {lines!r}"
    order = {"input_file_id": input_id, "endpoint": ROUTE, "completion_window": "24h"}
    _, answer = await call(world, "POST", "/v1/batches", order)
    target = f"/v1/batches/{json.loads(answer)['id']}"
    is_cancelled = flip(0.3)
    if is_cancelled:
        await asyncio.sleep(uniform(0.0, 10.0))
        await call(world, "POST", f"{target}/cancel")
    batch = await _watch(world, target)
    if batch["status"] == "failed":
        for error in batch["errors"]["data"]:
            _check_error(world, error["code"], is_cancelled)
        return
    assert batch["status"] == "completed" or (is_cancelled and batch["status"] == "cancelled"), (
        f"{target} is {batch['status']}: {batch}"
    )
    counts = batch["request_counts"]
    files = batch["output_file_id"], batch["error_file_id"]
    if batch["status"] == "cancelled" and files == (None, None):
        # The batch was cancelled before all lines were checked.
        assert set(counts.values()) == {0}, counts
        return
    assert counts["total"] == counts["completed"] + counts["failed"] == len(requests), counts
    contents: dict[str, bytes] = {}
    results, errors = [await _content(world, file, contents) for file in files]
    _check_once(requests, [*results, *errors])
    assert len(results) == counts["completed"], f"{len(results)} results, {counts}"
    for line in results:
        body = line["response"]["body"]["choices"][0]
        request = requests[line["custom_id"]]
        world.compare(request, body["message"]["content"], body["finish_reason"])
    for line in errors:
        error = line["error"] or line["response"]["body"]["error"]
        _check_error(world, error["code"], is_cancelled)
    world.counts["batches"] += 1
    await _check_again(world, target, batch, contents)
    await _delete_files(world, batch)


async def _embeds(world: World, requests: dict[str, Request]) -> None:
    """Embed texts or score pairs in a batch; the results are those of single requests."""
    route, given, field = choice(
        (
            ("/v1/embeddings", {"input": ["a text", "another"]}, "data"),
            ("/v1/rerank", {"query": "a text", "documents": ["one", "two"]}, "results"),
            ("/v1/score", {"text_1": "a text", "text_2": ["one", "two"]}, "data"),
        )
    )
    body = {"model": MODEL} | given
    alone = await answer_of(world, route, body)
    lines = [{"custom_id": key, "method": "POST", "url": route, "body": body} for key in requests]
    batch = await _run(world, b"".join(json.dumps(it).encode() + b"\n" for it in lines), route)
    if batch["status"] == "failed":
        for error in batch["errors"]["data"]:
            _check_error(world, error["code"], is_cancelled=False)
        return
    results = await _content(world, batch["output_file_id"], contents := dict[str, bytes]())
    errors = await _content(world, batch["error_file_id"], contents)
    _check_once(requests, [*results, *errors])
    for line in results:
        found = line["response"]["body"][field]
        assert found == alone[field], f"{found} instead of {alone[field]}"
    for line in errors:
        error = line["error"] or line["response"]["body"]["error"]
        _check_error(world, error["code"], is_cancelled=False)
    world.counts["batches of vectors"] += 1


async def _has_a_fault(world: World, requests: dict[str, Request]) -> None:
    """Send a file with one faulty line: the batch fails, and names the line."""
    lines = [
        json.dumps(
            {"custom_id": key, "method": "POST", "url": ROUTE, "body": request.body(False)}
        ).encode()
        for key, request in requests.items()
    ]
    at = randint(0, len(lines))
    first = lines[0]
    fault = choice(
        (
            first if at else b"{",
            b'{"half a line',
            b"[]",
            b"\xff",
            first.replace(ROUTE.encode(), b"/v1/unknown"),
            first.replace(b'"POST"', b'"GET"'),
            first.replace(MODEL.encode(), b"none").replace(b"key-", b"other-", 1),
            first.replace(b'"body"', b'"content"'),
            first.replace(b'"max_tokens"', b'"logprobs"'),
        )
    )
    lines.insert(at, fault)
    batch = await _run(world, b"\n".join(lines), ROUTE)
    errors = batch["errors"]["data"] if batch["status"] == "failed" else []
    assert errors, f"a batch with the line {fault!r} is {batch}"
    is_named = any(error["line"] in (at + 1, None) for error in errors)
    codes = [error["code"] for error in errors]
    # A line that repeats an id is reported for the chunk of lines that contains it.
    is_known = is_named or "duplicate_id" in codes or any(map(world.may_fail, codes))
    assert is_known, f"line {at + 1} is faulty, not {errors}"
    world.counts["batches with a faulty line"] += 1


async def _run(world: World, lines: bytes, route: str) -> Json:
    """Upload a file, run its batch, and return the batch once it has ended."""
    order = {
        "input_file_id": await _upload(world, lines),
        "endpoint": route,
        "completion_window": "24h",
    }
    _, answer = await call(world, "POST", "/v1/batches", order)
    return await _watch(world, f"/v1/batches/{json.loads(answer)['id']}")


async def _upload(world: World, lines: bytes) -> str:
    _, answer = await call(world, "POST", "/v1/files", form_of(lines))
    input_id: str = json.loads(answer)["id"]
    return input_id


def form_of(lines: bytes) -> bytes:
    """Return the form that uploads a file for a batch."""
    head = (
        f'--{FORM}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{FORM}\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    return head.encode() + lines + f"\r\n--{FORM}--\r\n".encode()


async def _watch(world: World, target: str) -> Json:
    """Poll until the batch has ended. Results that were seen stay as they are."""
    seen = b""
    while True:
        batch = await read(world, target)
        if (output_id := batch["output_file_id"]) is not None:
            _, now = await call(world, "GET", f"/v1/files/{output_id}/content")
            assert now.startswith(seen), f"{target}: {seen!r} became {now!r}"
            seen = now
        if batch["status"] in _ENDED:
            return batch
        await asyncio.sleep(uniform(0.5, 5.0))


async def _check_again(world: World, target: str, batch: Json, contents: dict[str, bytes]) -> None:
    """Read an ended batch and its results again later: nothing has changed since."""
    await asyncio.sleep(uniform(0.0, 60.0))
    now = await read(world, target)
    assert now == batch, f"{target} has ended as {batch}, and is now {now}"
    for content_target, content in contents.items():
        _, found = await call(world, "GET", content_target)
        assert found == content, f"{content_target}: {content!r} became {found!r}"


async def _all_end(world: World, listing: str) -> None:
    """Wait until all batches of this key have ended, even if their creation was not answered."""
    while True:
        batches = (await read(world, f"{listing}?limit=100"))["data"]
        if all(batch.get("ended_at") or batch.get("status") in _ENDED for batch in batches):
            return
        await asyncio.sleep(5.0)


async def _content(world: World, file_id: str | None, contents: dict[str, bytes]) -> list[Json]:
    """Return the lines of a result file, and add its content to `contents`."""
    if file_id is None:
        return []
    target = f"/v1/files/{file_id}/content"
    _, contents[target] = await call(world, "GET", target)
    return _lines(contents[target])


def _lines(content: bytes) -> list[Json]:
    return [json.loads(line) for line in content.splitlines()]


def _check_once(requests: dict[str, Request], lines: list[Json]) -> None:
    found = sorted(line["custom_id"] for line in lines)
    if len(found) != len(set(found)):
        raise Wrong(f"a line has two results: {found}")
    assert found == sorted(requests), f"results of {found} instead of {sorted(requests)}"


def _check_error(world: World, code: str, is_cancelled: bool) -> None:
    if code == "batch_cancelled":
        assert is_cancelled, "a line was cancelled, but the batch was not"
    else:
        assert world.may_fail(code), f"a line failed without a reason: {code}"
        world.counts["allowed failures"] += 1


async def _delete_files(world: World, batch: Json) -> None:
    ids = [batch[name] for name in ("input_file_id", "output_file_id", "error_file_id")]
    for file_id in filter(None, ids):
        # The answer of a deletion may be lost, and then the file is gone.
        await call(world, "DELETE", f"/v1/files/{file_id}", allowed=(200, 404))
    await asyncio.sleep(uniform(0.0, 20.0))
    for file_id in filter(None, ids):
        await call(world, "GET", f"/v1/files/{file_id}", allowed=(404,))
        world.counts["deleted files"] += 1


async def _anthropic(world: World, requests: dict[str, Request]) -> None:
    params = [
        {"custom_id": key, "params": _without_stream(request)} for key, request in requests.items()
    ]
    _, answer = await call(world, "POST", BATCHES, {"requests": params})
    target = f"{BATCHES}/{json.loads(answer)['id']}"
    is_cancelled = flip(0.3)
    if is_cancelled:
        await asyncio.sleep(uniform(0.0, 10.0))
        await call(world, "POST", f"{target}/cancel")
    while (batch := await read(world, target))["processing_status"] != "ended":
        await asyncio.sleep(uniform(0.5, 5.0))
    counts = batch["request_counts"]
    assert sum(counts.values()) == len(requests) and not counts["processing"], counts
    _, content = await call(world, "GET", f"{target}/results")
    lines = _lines(content)
    _check_once(requests, lines)
    for line in lines:
        result = line["result"]
        if result["type"] == "succeeded":
            message = result["message"]
            text = "".join(block["text"] for block in message["content"])
            request = requests[line["custom_id"]]
            expected = request.answer(world.model.tokenizer)
            found = (text, message["stop_reason"])
            wanted = (expected.text, _STOP_REASONS[expected.finish_reason])
            assert found == wanted, f"{request.key}: {found} instead of {wanted}"
            world.counts["answers"] += 1
        elif result["type"] == "errored":
            _check_error(world, result["error"]["error"]["code"], is_cancelled)
        else:
            assert result["type"] == "canceled" and is_cancelled, line
    world.counts["batches"] += 1
    await _check_again(world, target, batch, {f"{target}/results": content})
    await call(world, "DELETE", target, allowed=(200, 404))
    await asyncio.sleep(uniform(0.0, 20.0))
    await call(world, "GET", target, allowed=(404,))
    world.counts["deleted batches"] += 1


def _without_stream(request: Request) -> Json:
    body = request.body(False)
    del body["stream"]
    return body
