"""Makes request bodies: random and damaged bodies, and the largest bodies of costly kinds."""

import asyncio
import random
from collections.abc import Callable

from stress.attack.target import MAX_BODY, Attack, Manner, Target, by_clients, post

TRIGGER = "overrun-the-template"
TEMPLATE_HEAD = (
    "{%- set letter = 'a' if messages else 'b' -%}"
    "{%- if '" + TRIGGER + "' in messages[-1].content -%}"
    "{{ ((letter * 30000000) | list | map('upper') | sort | join('')) }}"
    "{%- endif -%}\n"
)
"""The costly head of a template, to be followed by a valid template.

The head is costly if the last message contains TRIGGER. It uses only built-in filters, because
these filters do not check a time limit.
"""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE, APPLY = "/tokenize", "/detokenize", "/apply-template"
LOOKUP = "/v1/streams/lookup"

_GENERATES = b"""
max_tokens max_completion_tokens min_tokens temperature top_p min_p top_k seed n best_of logit_bias
frequency_penalty presence_penalty repetition_penalty stop stop_token_ids ignore_eos stream
stream_options return_progress attach heartbeat sse_ping_interval skip_special_tokens model user
timings_per_token return_token_ids cache_prompt cache_salt priority logprobs echo tools metadata x
response_format""".split()
_TEMPLATE = b"""
add_generation_prompt continue_final_message chat_template_kwargs reasoning_effort""".split()
_FIELDS: dict[str, list[bytes]] = {
    CHAT: [b"messages", b"top_logprobs", *_GENERATES, *_TEMPLATE],
    TEXT: [b"prompt", b"suffix", b"add_special_tokens", *_GENERATES],
    TOKENIZE: b"content prompt messages add_special parse_special with_pieces model".split(),
    DETOKENIZE: [b"tokens", b"model"],
    APPLY: [b"messages", b"model", *_TEMPLATE],
    LOOKUP: [b"conversation_ids", b"x"],
}
_NEEDED: dict[str, bytes] = {
    CHAT: b'"messages":[{"role":"user","content":"Say hello."}],"max_tokens":4',
    TEXT: b'"prompt":"one two","max_tokens":4',
    TOKENIZE: b'"content":"one two three"',
    DETOKENIZE: b'"tokens":[100,200,300]',
    APPLY: b'"messages":[{"role":"user","content":"Say hello."}]',
    LOOKUP: b'"conversation_ids":["a","b"]',
}
_LEAVES = (
    *b"null true false 0 -0 1 2 -1 7 0.5 1.0 -0.0 1e-38 5e-324 1e38 1e308 1e400 -1e400".split(),
    *b"127 128 255 256 1023 1024 65536 2147483647 2147483648 4294967296".split(),
    *b"9007199254740993 9223372036854775807 9223372036854775808 18446744073709551616".split(),
    *(b"9" * 400, b"1" + b"0" * 5000, b"0." + b"0" * 5000 + b"1", b"1e-5000"),
    *(b'""', b'" "', b'"a"', b'"user"', b'"assistant"', b'"tool"', b'"system"', b'"\\u0000"'),
    *('"\u0661"'.encode(), '"😀"'.encode(), b'"\\ud83d\\ude00"', '"\u202ea\ufeff"'.encode()),
    *(b'"<|im_start|>system"', b'"<|im_end|>"', b'"{{ 7 * 7 }}"', b'"../../etc/passwd"'),
)
_SPOILED = (b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b"NaN")
"""JSON values. A body that contains any of these values is invalid."""


def drawn_body(rng: random.Random, route: str, longest: int = 1 << 22) -> tuple[bytes, bool]:
    """Return a body, and whether the server must refuse it."""
    parts = [_NEEDED[route]] if rng.random() < 0.8 else []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        parts.append(b'"%s":%s' % (rng.choice(_FIELDS[route]), _value(rng, 3, longest)))
    rng.shuffle(parts)
    body = b"{" + b",".join(parts) + b"}"
    return _spoiled(rng, body) if rng.random() < 0.3 else (body, False)


def _value(rng: random.Random, depth: int, longest: int) -> bytes:
    kind = rng.choice(("leaf",) * 6 + ("list", "list", "object", "message", "long", "deep"))
    if depth == 0 or kind == "leaf":
        return rng.choice(_LEAVES)
    below = [_value(rng, depth - 1, longest) for _ in range(rng.choice((0, 1, 2, 5)))]
    if kind == "list":
        return b"[" + b",".join(below) + b"]"
    # Keys are drawn with replacement, so an object may have the same key twice.
    if kind == "object":
        keys = [rng.choice((b"a", b"1", b"text", b"type", b"")) for _ in below]
        pairs = zip(keys, below, strict=True)
        return b"{" + b",".join(b'"%s":%s' % pair for pair in pairs) + b"}"
    if kind == "message":
        return _message(rng, below, rng.choice((1, 900, 200_000)))
    return _long(rng, longest) if kind == "long" else _deep(rng)


def _message(rng: random.Random, below: list[bytes], depth: int) -> bytes:
    """Return a list of messages; the last one has tool calls with arguments of all kinds."""
    arguments = rng.choice((*below, b'"' + b"[" * depth + b'"'))
    call = b'{"type":"function","function":{"name":"f","arguments":%s}}' % arguments
    return (
        b'[{"role":"user","content":"a"},{"role":"assistant","content":%s,"tool_calls":[%s,%s]}]'
    ) % (rng.choice((*below, b'""')), call, rng.choice((*below, b"{}")))


def _long(rng: random.Random, longest: int) -> bytes:
    size = int(longest ** rng.uniform(0.3, 1.0)) if rng.random() < 0.3 else rng.randrange(20_000)
    item = rng.choice((b"a", "é".encode(), "😀".encode(), b"\\u0041", b"\\n"))
    if rng.random() < 0.5:
        return b'"' + item * (size // len(item)) + b'"'
    item = rng.choice((b"1,", b"-1,", b"[],", b"{},", b'"",', b"null,", b'{"role":"user"},'))
    return b"[" + (item * (size // len(item) + 1))[:-1] + b"]"


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((3, 63, 64, 65, 500, 1100, 100_000))
    if rng.random() < 0.5:
        return b"[" * depth + b"]" * depth
    return b'{"a":' * depth + b"1" + b"}" * depth


def _spoiled(rng: random.Random, body: bytes) -> tuple[bytes, bool]:
    at = rng.randrange(len(body))
    kind = rng.randrange(7)
    if kind == 0:
        return body[:at], True
    if kind == 1:
        return b"\xef\xbb\xbf" + body, True
    if kind == 2:
        return body[:-1] + b',"y":' + rng.choice(_SPOILED) + b"}", True
    if kind == 3:
        return body + rng.choice((b"}", b"x", b"{}", b"\x00")), True
    # One byte is replaced; the body may still be valid.
    if kind == 4:
        return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :], False
    # A piece of the body is repeated.
    if kind == 5:
        return body[:at] + body[max(0, at - 9) :], False
    return b" " * rng.randrange(100_000) + body + b"\r\n\t ", False


def _fuzz(route: str) -> Attack:
    @by_clients(3)
    async def fuzz(target: Target, rng: random.Random) -> None:
        for _ in range(target.num_each):
            longest = MAX_BODY - 100_000 if rng.random() < 0.03 else 100_000
            body, is_invalid = drawn_body(rng, route, longest)
            expects = "refusal" if is_invalid else "any"
            await target.ask(post(route, body), Manner(expects, within_s=30.0, cut_after=1 << 16))

    return fuzz


@by_clients(4)
async def _fields(target: Target, rng: random.Random) -> None:
    """Sends each field of each route with values of every kind, with only the required fields."""
    for route, names in _FIELDS.items():
        for name in names:
            values = rng.sample(_LEAVES, min(len(_LEAVES), target.num_each // 2))
            if name == b"messages":
                values += [_message(rng, [], 200_000), _message(rng, values, 900)]
            for value in values:
                body = b'{%s,"%s":%s}' % (_NEEDED[route], name, value)
                await target.ask(post(route, body), Manner(within_s=5.0, cut_after=1 << 14))


BODIES = {
    "bodies-fields": _fields,
    **{
        f"bodies-{route.removeprefix('/v1/').replace('/', '-').strip('-')}": _fuzz(route)
        for route in _FIELDS
    },
}


def _filled(head: bytes, item: bytes, tail: bytes, number: int | None = None) -> bytes:
    """Return a body with `number` items, or with as many items as an allowed body can hold."""
    room = (MAX_BODY - len(head) - len(tail)) // len(item)
    return head + (item * min(room, number or room))[:-1] + tail


def _two(
    *bodies: tuple[str, Callable[[], bytes]], expects: str = "any"
) -> Callable[[Target], object]:
    """Return an attack that sends two large bodies at the same time and waits for both answers.

    If only one body is given, the attack sends this body twice.
    """

    async def volley(target: Target) -> None:
        calls = [post(route, make()) for route, make in (*bodies, *bodies)[:2]]
        manner = Manner(expects, within_s=240.0)
        await asyncio.gather(*(target.ask(call, manner) for call in calls))

    return volley


def _ids(number: int | None, name: bytes, item: bytes) -> Callable[[], bytes]:
    return lambda: _filled(b'{"%s":[' % name, item, b"]}", number)


def _unknown_field() -> bytes:
    return _filled(b'{"x":[', b"[],", b"]," + _NEEDED[CHAT] + b"}")


def _many_prompts() -> bytes:
    return b'{"prompt":[' + b'"a",' * 1023 + b'"a"],"n":64,"max_tokens":16}'


def _emoji(head: bytes, tail: bytes) -> Callable[[], bytes]:
    return lambda: _filled(head + "😀".encode(), b"a", b"a" + tail)


def _messages() -> bytes:
    item = b'{"role":"user","content":"a"},'
    return _filled(b'{"max_tokens":1,"messages":[', item, b"]}", 250_000)


def overrun() -> bytes:
    return b'{"messages":[{"role":"user","content":"%s"}],"max_tokens":1}' % TRIGGER.encode()


_CONTENT = b'{"content":"', b'"}'
_SAID = b'{"max_tokens":1,"messages":[{"role":"user","content":"', b'"}]}'

WORST = {
    "worst-ids-16m": _two(
        (TEXT, _ids(None, b"prompt", b"1,")), (DETOKENIZE, _ids(None, b"tokens", b"1,"))
    ),
    "worst-ids-5m": _two(
        (TEXT, _ids(5_000_000, b"prompt", b"1001,")),
        (DETOKENIZE, _ids(5_000_000, b"tokens", b"1001,")),
    ),
    "worst-unknown-field": _two((CHAT, _unknown_field)),
    "worst-prompts-n64": _two((TEXT, _many_prompts)),
    "worst-emoji": _two((CHAT, _emoji(*_SAID)), (TOKENIZE, _emoji(*_CONTENT))),
    "worst-messages": _two((CHAT, _messages), (APPLY, _messages)),
    "worst-template": _two((CHAT, overrun), (APPLY, overrun)),
}
"""Attacks that each send two of the largest bodies of a costly kind at the same time."""
