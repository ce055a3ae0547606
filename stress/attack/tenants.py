"""Attacks by one API key on another; each attack has its own server."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from websockets.asyncio.client import connect

from stress.attack.bodies import TEXT, TOKENIZE
from stress.attack.target import Manner, Target, post
from stress.http import Call, Reply
from stress.site import Site

MAX_SLOWER = 6.0
"""A body of 1 MB may take at most this many times as long as on an idle server."""

_ONE = "headrace-mini"
_ANN, _BOB, _BOSS = ((("X-Api-Key", key),) for key in ("ann", "bob", "boss"))
_FLAGS = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--drain-s", "1")
_KEYS = ("--api-key", "ann", "--api-key", "bob", "--admin-key", "boss")
_WORDS = b"many words of a text "
_PATIENT = Manner(within_s=80.0)
_GOOD = Manner("good", within_s=80.0)
_STAYS_S = 2.0
# How many large bodies one key sends at the same time, and how many of these bodies the server
# must accept.
_NUM_LARGE, _MOST_LARGE = 16, 1 + 8
_LONG = b'{"model":"a","prompt":"Count.","max_tokens":3000,"ignore_eos":true}'


async def flood(target: Target) -> None:
    """Sends four bodies of 30 MB, and disconnects two seconds later."""
    async with _server(target, _ONE) as own:
        quiet = sorted([await _seconds(own) for _ in range(3)])[1]
        raw = _tokenize(30_000_000, _ANN).raw()
        clients = await asyncio.gather(*(_upload(own.site.port, raw) for _ in range(4)))
        asking = asyncio.create_task(_seconds(own))
        await asyncio.sleep(_STAYS_S)
        for client in clients:
            client.transport.abort()
        beside = await asking
        after = await _seconds(own)
        found = f"{quiet:.2f} s before, {beside:.2f} s during, {after:.2f} s after the flood"
        target.notes.append(found)
        if max(beside, after) > MAX_SLOWER * quiet:
            target.fail(f"another key's 1 MB took {found}")


async def crowd(target: Target) -> None:
    """Sends more large bodies than one key may send at the same time.

    Small bodies, and bodies of other keys, must still be accepted.
    """
    async with _server(target, _ONE) as own:
        call = _tokenize(1_000_000, _ANN)
        asking = [asyncio.create_task(own.ask(call, _PATIENT)) for _ in range(_NUM_LARGE)]
        await asyncio.sleep(0.5)
        for key in (_ANN, _BOB):
            await own.ask(_tokenize(100, key), _GOOD)
        is_over = [it.done() for it in asking]
        await own.ask(_tokenize(100_000, _BOB), _GOOD)
        answers = await asyncio.gather(*asking)
        codes = [answer.code or str(answer.status) for answer in answers]
        if all(is_over):
            target.fail("a key's small body waited for its large bodies")
        if set(codes) != {"200", "rate_limit_exceeded"} or codes.count("200") < _MOST_LARGE:
            target.fail(f"{_NUM_LARGE} large bodies sent together with one key: {codes}")


async def unload(target: Target) -> None:
    """Unloads a model while another key's request waits for it."""
    async with _server(target, f"--model=a={_ONE}", f"--model=b={_ONE}") as own:
        call = post("/models/unload", b'{"model":"a"}', *_BOB)
        waiting = asyncio.create_task(own.ask(post(TEXT, _LONG, *_ANN), _GOOD))
        while not waiting.done() and await _state(own) != "loading":
            await asyncio.sleep(0.02)
        if (refused := await own.ask(call)).code != "forbidden":
            target.fail(f"a client's key was allowed to unload a model: {refused.status}")
        await own.ask(post("/models/unload", call.body, *_BOSS), _GOOD)
        await waiting


async def peep(target: Target) -> None:
    """Tries to see one key's streams with another key, and to connect from a foreign web page."""
    async with _server(target, f"--model=a={_ONE}") as own:
        asking = asyncio.create_task(own.ask(post(TEXT, _LONG, *_ANN), _PATIENT))
        seen = {_ANN: 1, _BOB: 0, _BOSS: 1}
        while not asking.done() and await _num_running(own, _BOSS) == 0:
            await asyncio.sleep(0.02)
        for key, expected in seen.items():
            if (found := await _num_running(own, key)) != expected and not asking.done():
                target.fail(f"{key[0][1]} sees {found} busy slots instead of {expected}")
        asking.cancel()
        url = f"ws://127.0.0.1:{own.site.port}/v1/realtime-text"
        headers = {"Origin": "https://evil.example", "X-Api-Key": "bob"}
        async with connect(url, additional_headers=headers) as socket:
            first = msgspec.json.decode(await socket.recv())
        if first.get("error", {}).get("code") != "forbidden":
            target.fail(f"a page of another host can open a WebSocket: {first}")
        await own.talk([b"GET /\r\n\r\n"], Manner("refusal"))


TENANTS = {f"tenants-{attack.__name__}": attack for attack in (flood, crowd, unload, peep)}


@contextlib.asynccontextmanager
async def _server(target: Target, model: str, *more: str) -> AsyncIterator[Target]:
    with tempfile.TemporaryDirectory(dir=target.folder) as folder:
        site = Site(model, folder, (*more, *_FLAGS, *_KEYS))
        site.start()
        try:
            if not await site.ready():
                target.fail(f"a server with keys does not start: {site.last_lines[-4:]}")
                return
            own = Target(site, "", target.folder, target.num_each, target.fail)
            own.statuses = target.statuses
            yield own
            if code := await site.stop():
                target.fail(f"the server with keys exited with code {code}")
            for complaint in site.complaints:
                target.fail(f"in the log of the server with keys: {complaint}")
        finally:
            site.close()


def _tokenize(size: int, key: tuple[tuple[str, str], ...]) -> Call:
    text = (_WORDS * (size // len(_WORDS) + 1))[:size]
    return post(TOKENIZE, b'{"content":"%s"}' % text, *key)


async def _upload(port: int, raw: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    # The server may refuse the body before all of it is sent.
    with contextlib.suppress(OSError):
        writer.write(raw)
        await writer.drain()
    return writer


async def _seconds(own: Target) -> float:
    """Return how many seconds another key's body of 1 MB takes."""
    began = time.monotonic()
    await own.ask(_tokenize(1_000_000, _BOB), _GOOD)
    return time.monotonic() - began


async def _get(own: Target, path: str, key: tuple[tuple[str, str], ...]) -> Any:
    answer: Reply = await own.ask(Call("GET", path, headers=key), _GOOD)
    return answer.json


async def _state(own: Target) -> str:
    listed = (await _get(own, "/models", _BOB))["data"]
    return next(str(entry["status"]["value"]) for entry in listed if entry["id"] == "a")


async def _num_running(own: Target, key: tuple[tuple[str, str], ...]) -> int:
    return sum(slot["is_processing"] for slot in await _get(own, "/slots", key))
