"""Clients of every kind; each client repeats its request until the request is answered."""

import asyncio
import contextlib
import random
from urllib.parse import quote

import msgspec

from stress.frames import error_in, own_dropped
from stress.http import Call, Exchange
from stress.story import Story, Way
from stress.witness import Proxy
from tools.harness.sse import Frame, frames_of

WAYS = (
    Way("byte", "conversation"),
    Way("byte", "both", has_second_reader=True),
    Way("byte", "both"),
    Way("event", "key", has_second_reader=True, more={"stream_options": {"include_usage": True}}),
    Way("event", "key"),
    Way("event", "both"),
    Way("whole", "key"),
    Way("whole", "both"),
    Way("whole", "key", more={"heartbeat": True}),
    Way("whole", "plain"),
    Way("event", "plain"),
    Way("event", "plain"),
)


def draw_way(rng: random.Random) -> Way:
    return rng.choice(WAYS)


async def live(story: Story, proxy: Proxy) -> None:
    """Runs the client of one request until the request has an outcome."""
    second = None
    if story.way.has_second_reader:
        second = asyncio.create_task(_read_events(story, proxy))
    if story.way.face == "whole":
        await _whole(story, proxy)
    elif story.way.is_plain:
        await _plain(story, proxy)
    elif story.way.face == "byte":
        await _by_byte(story, proxy)
    else:
        await _by_event(story, proxy)
    if second is not None:
        if story.outcome != "finished":
            second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second


async def _by_byte(story: Story, proxy: Proxy) -> None:
    name = quote(story.label, safe="")
    may_exist = False
    while not story.is_over:
        if story.stream_id is None and not may_exist:
            call = story.post()
        else:
            num_bytes = len(story.body)
            call = Call("GET", f"/v1/stream?conv_id={name}&from={num_bytes}", start=num_bytes)
        made = await story.ask(proxy, call)
        may_exist = call.method == "POST"
        if made.got.status == 200:
            story.body += made.got.body
            _end_by_byte(story)
        elif made.got.status != 404 or story.stream_id is not None:
            story.end_by_status(made)


def _end_by_byte(story: Story) -> None:
    story.end_with(story.frames_by_byte())
    num_posts = sum(made.call.method == "POST" for made in story.exchanges)
    if story.outcome == "failed: replaced" and num_posts > 1:
        # A request that is repeated without a key replaces its first stream; only the newest stream
        # counts.
        story.outcome, story.stream_id = "", None
        story.body.clear()


async def _by_event(story: Story, proxy: Proxy) -> None:
    while not story.is_over:
        call = story.post()
        if story.stream_id is not None:
            call = _events_call(story.stream_id, story.frames, "?view=wire")
        made = await story.ask(proxy, call)
        if made.got.status == 200:
            story.frames += own_dropped(frames_of(bytes(made.got.body)))
            story.end_with(story.frames)
        else:
            story.end_by_status(made)


async def _read_events(story: Story, proxy: Proxy) -> None:
    """Reads the log of the request's stream as a second reader."""
    await story.has_stream.wait()
    stream_id = story.stream_id
    assert stream_id is not None
    has_ended = False
    while not has_ended and story.outcome in ("", "finished"):
        made = await story.ask(proxy, _events_call(stream_id, story.second, ""))
        if made.got.status == 200:
            story.second += own_dropped(frames_of(bytes(made.got.body)))
        has_ended = made.got.status == 204
        has_ended |= bool(story.second) and story.second[-1].event in ("finish", "error")


def _events_call(stream_id: str, frames: list[Frame], query: str) -> Call:
    cursor = frames[-1].id if frames else None
    headers = (("Last-Event-ID", cursor),) if cursor else ()
    return Call("GET", f"/v1/streams/{stream_id}/events{query}", headers=headers, start=cursor)


async def _whole(story: Story, proxy: Proxy) -> None:
    """Requests an unstreamed answer again and again until the whole answer arrives."""
    while not story.is_over:
        made = await story.ask(proxy, story.post())
        if made.got.status == 200 and made.got.is_whole:
            story.body[:] = made.got.body.strip()
            story.outcome = _outcome_of_whole(story)
        elif made.got.status != 200:
            story.end_by_status(made)


_COME_BACK = ("server_shutdown", "server_restarting", "storage_unavailable", "storage_stalled")
"""After these errors, the client repeats its request with the same key and gets the answer."""


def _outcome_of_whole(story: Story) -> str:
    body = msgspec.json.decode(story.body)
    if "error" not in body:
        return "finished"
    code = body["error"]["code"]
    return "" if code in _COME_BACK else f"failed: {code}"


async def _plain(story: Story, proxy: Proxy) -> None:
    """Requests a stream that is not durable, so a broken connection ends the stream."""
    while not story.is_over:
        made = await story.ask(proxy, story.post())
        if made.got.status == 200:
            _end_plain(story, made)
        else:
            story.end_by_status(made)


def _end_plain(story: Story, made: Exchange) -> None:
    story.frames = frames_of(bytes(made.got.body))
    story.end_with(story.frames)
    found = error_in(story.frames[-1:])
    if not story.outcome or (found and found[1] == "server_shutdown"):
        story.outcome = "cut"
