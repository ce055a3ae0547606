"""Misuse of HTTP: broken connections, unusual framing, and hostile names and paths."""

import asyncio
import random
import re
from urllib.parse import quote

from headrace.gateway.http_server import MAX_AHEAD
from stress.attack.bodies import APPLY, CHAT, DETOKENIZE, LOOKUP, TEXT, TOKENIZE
from stress.attack.target import Manner, Target, by_clients, post
from stress.http import Call, Reply

_ASKED = b'{"prompt":"one two","max_tokens":40,"ignore_eos":true,"stream":true}'
_QUICK = b'{"content":"one two three"}'
_JSON = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
_RUDE = Manner("rude", within_s=3.0)


def _headed(route: str, framing: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\n" % route.encode() + _JSON + framing + b"\r\n\r\n" + body


@by_clients(6)
async def resets(target: Target, rng: random.Random) -> None:
    """Resets connections after any byte of the request or of the answer."""
    for _ in range(target.num_each):
        raw = post(TEXT, _ASKED, ("X-Conversation-Id", f"r{rng.randrange(5)}")).raw()
        if rng.random() < 0.5:
            manner = Manner("rude", cut_after=int(10 ** rng.uniform(0, 4)))
            await target.talk([raw], manner)
        else:
            await target.talk([raw[: rng.randrange(len(raw))]], Manner("rude", within_s=0.05))


@by_clients(4)
async def half_closed(target: Target, rng: random.Random) -> None:
    for _ in range(target.num_each):
        raw = post(*rng.choice(((TEXT, _ASKED), (TOKENIZE, _QUICK)))).raw()
        at = rng.choice((len(raw), rng.randrange(len(raw))))
        await target.talk([raw[:at]], Manner("rude", half_closes=True, within_s=5.0))


async def slow(target: Target) -> None:
    """Sends requests slowly, half of them without their end. Complete requests must be answered."""

    async def live(target: Target, rng: random.Random) -> None:
        raw = post(TOKENIZE, _QUICK).raw()
        cuts = sorted(rng.sample(range(1, len(raw)), 12))
        pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        if rng.random() < 0.5:
            await target.talk(pieces, Manner("good", pause_s=0.1, within_s=15.0))
        else:
            await target.talk(pieces[:-2], Manner("rude", pause_s=0.1, within_s=2.0))

    await asyncio.gather(*(live(target, target.rng(n)) for n in range(2 * target.num_each)))


@by_clients(3)
async def pipelining(target: Target, rng: random.Random) -> None:
    for _ in range(target.num_each):
        calls = [
            rng.choice((Call("GET", "/health"), Call("GET", "/v1/models"), post(TOKENIZE, b"{")))
            for _ in range(rng.randrange(2, 40))
        ]
        raws = [c.raw().replace(b"Connection: close\r\n", b"") for c in calls]
        talk = await target.talk([b"".join(raws)], Manner(num_answers=len(calls)))
        # If a client pipelines too many requests, the server answers only one and disconnects.
        num_owed = len(calls) if len(calls) <= MAX_AHEAD else 1
        if not talk.has(num_owed):
            target.fail(f"{len(talk.answers)} answers to {len(calls)} in a row: {talk.end}")


@by_clients(2)
async def chunked(target: Target, rng: random.Random) -> None:
    """Sends unusual but valid chunked bodies, and invalid ones."""
    for _ in range(target.num_each):
        pieces, rest = [], _QUICK
        while rest:
            size = rng.randrange(1, 9)
            shape = rng.choice((b"%x", b"%X", b"000%x", b"%x;a=b"))
            pieces.append(shape % min(size, len(rest)) + b"\r\n" + rest[:size] + b"\r\n")
            rest = rest[size:]
        good = b"".join([*pieces, b"0\r\n\r\n"])
        framing = b"Transfer-Encoding: chunked"
        await target.talk([_headed(TOKENIZE, framing, good)], Manner("good"))
        size = rng.choice((b"-1", b"g", b"", b"f" * 17, b"0x5", b"ffffffff", b"1\n", b" "))
        bad = b"".join(pieces[:2]) + size + b"\r\nabc\r\n0\r\n\r\n"
        await target.talk([_headed(TOKENIZE, framing, bad)], Manner("rude", within_s=0.3))


@by_clients(2)
async def wrong_length(target: Target, rng: random.Random) -> None:
    for length in (b"1", b"26", b"28", b"1000", b"-1", b"+27", b"a", b"", b"27, 27", b"9" * 40):
        raw = _headed(TOKENIZE, b"Content-Length: " + length, _QUICK)
        await target.talk([raw], Manner("rude", within_s=0.5, half_closes=rng.random() < 0.5))
    for framing in (
        b"Content-Length: 27\r\nContent-Length: 5",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: gzip",
    ):
        await target.talk([_headed(TOKENIZE, framing, _QUICK)], Manner("rude", within_s=0.5))
    too_long = _headed(TOKENIZE, b"Content-Length: 33554433", b" " * 1000)
    await target.talk([too_long], Manner("refusal"))


@by_clients(300)
async def idle_sockets(target: Target, rng: random.Random) -> None:
    """Opens 300 connections that send no complete head. Other connections must still be served."""
    beginning = rng.choice((b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nContent-Len"))
    await target.talk([beginning], Manner("rude", within_s=2.0))


async def header_injection(target: Target) -> None:
    """Tries to inject a header through each value that the server may return in an answer."""
    evil = "a\r\nX-Injected: 1"
    sent = [
        ("GET", "/health", (("X-Request-Id", evil),)),
        ("GET", "/health", (("X-Request-Id", "a\tb"),)),
        ("GET", "/health", (("X-Request-Id", "é" * 200),)),
        ("GET", f"/v1/stream?conv_id={quote(evil)}", ()),
        ("GET", f"/v1/streams/{quote(evil)}", ()),
        ("GET", f"/v1/models/{quote(evil)}", ()),
        ("GET", "/v1/streams/a/events", (("Last-Event-ID", evil),)),
        ("GET", "/health", (("X-Long", "a" * 200_000),)),
        ("GET", "/health", tuple((f"X-{n}", "a") for n in range(2000))),
        ("GET", "/health", (("Host", "evil.example"),)),
        ("GET", "/v1/models", (("Host", "evil.example"), ("Origin", "http://evil.example"))),
        ("GET", "/health", (("X-Nul", "a\0b"),)),
        ("POST", TEXT, (("X-Conversation-Id", evil),)),
        ("POST", TEXT, (("Idempotency-Key", evil),)),
    ]
    for method, path, headers in sent:
        body = _ASKED if method == "POST" else b""
        talk = await target.talk([Call(method, path, body, headers).raw()], _RUDE)
        if any("x-injected" in answer.headers for answer in talk.answers):
            target.fail(f"a header was injected by {method} {path} {headers}"[:300])


_NAMES = (
    *(
        "a",
        " ",
        "a b",
        "a/b",
        "../../etc/passwd",
        "..%2f..",
        "%00",
        "a%0d%0ab",
        "?",
        "#",
        "::",
        "'",
    ),
    *('"', "' OR 1=1 --", "\x01", "\x7f", "é", "\u202e", "😀", "a" * 512, "a" * 513, "a" * 20_000),
)


@by_clients(3)
async def hostile_names(target: Target, rng: random.Random) -> None:
    """Sends hostile conversation ids and keys to every route that accepts one."""
    for _ in range(target.num_each):
        name = rng.choice(_NAMES)
        header = rng.choice(("X-Conversation-Id", "Idempotency-Key"))
        body = b'{"prompt":"%d","max_tokens":2}' % rng.randrange(3)
        raw = post(TEXT, body).raw().split(b"\r\n", 1)
        line = f"{header}: {name}\r\n".encode()
        await target.talk([raw[0] + b"\r\n" + line + raw[1]], Manner("rude"))
        for method, path in (
            ("GET", f"/v1/stream?conv_id={quote(name, safe='')}"),
            ("GET", f"/v1/stream/{quote(name)}"),
            ("GET", f"/v1/streams/{quote(name, safe='')}"),
            ("DELETE", f"/v1/stream/{quote(name)}"),
            ("DELETE", f"/v1/streams/{quote(name)}"),
            ("POST", f"/v1/streams/{quote(name, safe='')}/cancel"),
        ):
            await target.ask(Call(method, path), Manner(cut_after=1 << 16))


_NUMBERS = (
    *("0", "1", "-1", "1000", "1001", "1e3", "0.5", "", " ", "+1", "\u0661", "NaN", "inf", "0x1"),
    *("9" * 15, "9" * 16, "9" * 5000, "a", "%00", "1;2", "[]", "true"),
)


async def hostile_queries(target: Target) -> None:
    """Sends hostile cursors, offsets and limits to the routes of an existing stream."""
    named = (("Idempotency-Key", "q"), ("X-Conversation-Id", "q"))
    made = await target.ask(post(TEXT, _ASKED, *named), Manner("good"))
    stream_id = made.headers.get("x-stream-id", "none")
    base = f"/v1/streams/{stream_id}/events"
    as_page = (("Accept", "application/json"),)
    rng = target.rng()
    for number in _NUMBERS:
        # The server may accept a number or refuse it; everything else must be refused.
        plain = "any" if re.fullmatch(r"[0-9]*(\.[0-9]+)?", number) else "refusal"
        value = quote(number, safe="%")
        after = rng.choice(("", stream_id + ":", "other:")) + number
        after += rng.choice(("", ".0", ".1", ".999999", ".", ".1.1"))
        for path, headers in (
            (f"{base}?limit={value}", as_page),
            (f"{base}?wait={value}&after=0", as_page),
            (f"{base}?after={quote(after)}", as_page),
            (f"{base}?after={quote(after)}", ()),
            (f"{base}?view=wire&after={quote(after)}", ()),
            (f"{base}?view=wire", (("Last-Event-ID", after.encode().decode("latin-1")),)),
            (f"/v1/stream?conv_id=q&from={value}", ()),
            (f"/v1/stream/q?from={value}&stream_id={value}", ()),
        ):
            raw = Call("GET", path, b"", headers).raw()
            is_cursor = "after=" in path.partition("&")[0] or "view=" in path
            expects = "any" if is_cursor else plain
            await target.talk([raw], Manner(expects, within_s=3.0))


_ROUTES = (
    *("/health", "/health/live", "/v1/models", "/props", "/openapi.json", "/manage/state"),
    *("/v1/streams/a", "/v1/streams/a/events", "/v1/stream", "/v1/streams/a/cancel", "/", "/*"),
    *(CHAT, TEXT, TOKENIZE, DETOKENIZE, APPLY, LOOKUP),
)


async def methods(target: Target) -> None:
    """Sends every method to every route, whether or not the route has it."""
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "HEAD", "GET", "POST", "DELETE", "BREW"):
        for route in _ROUTES:
            raw = Call(method, route).raw()
            manner = Manner("rude", within_s=2.0, has_bodies=method != "HEAD")
            await target.talk([raw], manner)


async def traversal(target: Target) -> None:
    """Tries to read files of the server with paths that contain ".."."""
    up = ("../", "..%2f", "%2e%2e/", "..\\", "..%5c", "..;/", "%c0%ae%c0%ae/", "..%00/")
    roots = ("/", "/v1/", "/v1/models/", "/v1/stream/", "/v1/streams/", "/v1/streams/a/", "//")
    paths = [root + step * 8 + "etc/passwd" for root in roots for step in up]
    paths += ["/" + "a" * 60_000, "/" + "a/" * 20_000, "http://evil.example/health", "*", "a", "/%"]
    paths += ["/%ff%fe", "/\u00e9", "/?" + "a=1&" * 10_000, "/health/", "//health", "/./health"]

    def check(path: str, answer: Reply) -> None:
        if b"root:" in answer.body:
            target.fail(f"{path} returned the content of a file")

    async def live(paths: list[str]) -> None:
        for path in paths:
            talk = await target.talk([Call("GET", path).raw()], _RUDE)
            for answer in talk.answers:
                check(path, answer)

    await asyncio.gather(*(live(paths[n::4]) for n in range(4)))


WIRES = {
    f"http-{attack.__name__.replace('_', '-')}": attack
    for attack in (
        resets,
        half_closed,
        slow,
        pipelining,
        chunked,
        wrong_length,
        idle_sockets,
        header_injection,
        hostile_names,
        hostile_queries,
        methods,
        traversal,
    )
}
