"""The requests of tools/wire_corpus.py: drawn from a fixed seed, sent one after the other."""

import random
import socket
from typing import Any

from tools.wire_corpus import Answer, Recorder, answer_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_SEED = 20261122
_WORDS = ("river", "stone", "cloud", "Äpfel", "東京", "🙂", "one", "two", "three\n\t", "quick")
_CONVERSATION, _KEY = "X-Conversation-Id", "Idempotency-Key"


def _text(rng: random.Random, most: int = 6) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, most)))


def _chat(rng: random.Random) -> dict[str, Any]:
    roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"] * rng.randint(0, 2) + ["user"]
    return {"messages": [{"role": role, "content": _text(rng)} for role in roles]}


def _prompt(rng: random.Random) -> dict[str, Any]:
    def ids() -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randint(1, 12))]

    forms = [_text(rng), [_text(rng), _text(rng)], ids(), [ids(), ids()]]
    return {"prompt": rng.choice(forms)}


def _options(rng: random.Random) -> dict[str, Any]:
    """Fields that both routes share. A stop string ends a choice when the engine has let go of it,
    so that one choice alone may have one where the order of frames counts."""
    body: dict[str, Any] = {"seed": rng.randrange(1000), "max_tokens": rng.randint(1, 14)}
    body |= rng.choice(({"temperature": 0}, {"temperature": 1}, {"temperature": 1.5, "top_k": 40}))
    for name, values in _SOMETIMES.items():
        if rng.random() < 0.25:
            body[name] = rng.choice(values)
    return body


_SOMETIMES: dict[str, tuple[Any, ...]] = {
    "top_p": (0.9, 1),
    "min_p": (0.05,),
    "frequency_penalty": (0.5, -1),
    "presence_penalty": (1,),
    "repetition_penalty": (1.1,),
    "logit_bias": ({"65": 5, "66": -100},),
    "n": (2, 3),
    "min_tokens": (1,),
    "stop_token_ids": ([65, 66], [200]),
    "ignore_eos": (True,),
    "skip_special_tokens": (False, True),
    "timings_per_token": (True,),
    "return_token_ids": (True,),
    "return_progress": (True,),
    "cache_prompt": (False,),
    "cache_salt": ("salt",),
    "priority": (3,),
    "user": ("somebody",),
    "verbosity": ("low",),
    "no_such_field": (1,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}


def generations(recorder: Recorder) -> None:
    """Both routes, streamed and whole, with what a drawn request asks for."""
    rng = random.Random(_SEED)
    for number in range(80):
        is_chat, streams = number % 2 == 0, number % 4 < 2
        body = _options(rng) | (_chat(rng) if is_chat else _prompt(rng))
        has_scores = rng.random() < 0.3
        if is_chat and has_scores:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 4)}
        elif has_scores:
            body["logprobs"] = rng.randint(0, 4)
        if not is_chat and rng.random() < 0.3:
            body["echo"] = True
        is_single = "n" not in body and not isinstance(body.get("prompt"), list)
        if rng.random() < 0.4 and (is_single or not streams):
            stops = [chr(rng.randrange(32, 127)) for _ in range(3)]
            body |= {"stop": stops, "include_stop_str_in_output": rng.random() < 0.5}
        if streams:
            usage = {"include_usage": rng.random() < 0.5}
            body |= {"stream": True, "stream_options": usage}
            if rng.random() < 0.4:
                usage["continuous_usage_stats"] = True
        route = CHAT if is_chat else TEXT
        form = "stream" if streams else "whole"
        recorder.send(f"generate {number} {route} {form}", "POST", route, body)


def long_prompts(recorder: Recorder) -> None:
    """Several chunks, with the progress of each, cold and from the cache."""
    body = {"prompt": "abcdefgh " * 60, "temperature": 0, "seed": 1, "max_tokens": 4}
    for name, more in (
        ("cold", {"stream": True, "return_progress": True}),
        ("cached", {"stream": True, "return_progress": True}),
        ("whole", {}),
        ("heartbeat", {"heartbeat": True}),
        ("no heartbeat", {"stream": True, "heartbeat": False}),
        ("scored", {"echo": True, "logprobs": 1, "max_tokens": 0}),
    ):
        recorder.send(f"long prompt: {name}", "POST", TEXT, body | more)
    chat = {
        "messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "th"}]
    }
    recorder.send("continued message", "POST", CHAT, chat | {
        "continue_final_message": True, "temperature": 0, "seed": 2, "max_tokens": 5,
    })  # fmt: skip


_WRONG: dict[str, tuple[Any, ...]] = {
    "model": ("nobody", 3, ""),
    "max_tokens": ("many", -2, 1.5, 1 << 40, 5000),
    "max_completion_tokens": (0, "x"),
    "min_tokens": (-1, 99),
    "temperature": (-1, 101, "hot", None),
    "top_p": (1.1, "x", True),
    "min_p": (-0.1,),
    "top_k": (-2, 1.5),
    "frequency_penalty": (3,),
    "repetition_penalty": (0,),
    "logit_bias": ({"x": 1}, {"1": 101}, {"1": None}, [1], {"999": 1}),
    "seed": (1.5, "x", 1 << 70),
    "n": (0, 129, "2"),
    "best_of": (2,),
    "stop": (3, [1], ["x"] * 65, "y" * 1001, ""),
    "stop_token_ids": ([-1], ["a"], 5, [99999], [1.0]),
    "stream": ("yes", 1),
    "stream_options": ([], {"include_usage": 1}, {"continuous_usage_stats": True}),
    "sse_ping_interval": (0, 61),
    "cache_salt": ("", 1),
    "priority": (101,),
    "tools": ([{"type": "function"}],),
    "tool_choice": ("required",),
    "response_format": ({"type": "json_object"},),
    "grammar": ("root ::= x",),
    "return_ingestion": (1,),
    "use_beam_search": (1,),
    "logprobs": ("x", 21),
    "top_logprobs": (21, 3),
    "add_generation_prompt": (1,),
    "continue_final_message": (True,),
    "chat_template_kwargs": ({"messages": []}, 3),
    "messages": (
        *(None, [], "hello", [1], [{}], [{"role": "nobody", "content": "x"}]),
        *([{"role": "user"}], [{"role": "user", "content": 1}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "long " * 400}],
    ),
}
_WRONG_PROMPTS: tuple[dict[str, Any], ...] = (
    {},
    *({"prompt": value} for value in (None, "", [], {}, 5, [[]], ["a", 1], [1, "a"], [-1])),
    *({"prompt": value} for value in ([5000], [[1], [5000]], "x" * 2000, [True], ["a"] * 1025)),
    {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "echo": 1},
    {"prompt": "a", "logprobs": True},
    {"prompt": ["a"] * 100, "n": 11},
)
_NO_JSON = {
    "empty": b"",
    "half": b'{"messages": [',
    "no object": b"[]",
    "number": b"5",
    "bad utf-8": b'{"messages": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "twice": b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "temperature": 0}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "deep": b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "trailing": b'{"prompt": "a"} x',
    "bom": b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1, "temperature": 0}',
}


def bad_bodies(recorder: Recorder) -> None:
    """Every kind of refusal that a body can earn; some fields are accepted, and that counts too."""
    for field, values in _WRONG.items():
        for number, value in enumerate(values):
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "seed": 1}
            recorder.send(f"wrong {field} {number}", "POST", CHAT, body | {field: value})
    for number, body in enumerate(_WRONG_PROMPTS):
        fixed = {"max_tokens": 1, "temperature": 0, "seed": 1}
        recorder.send(f"wrong prompt {number}", "POST", TEXT, fixed | body)
    for name, raw in _NO_JSON.items():
        recorder.send(f"no JSON: {name}", "POST", TEXT, raw)
    for media in ("text/plain", "application/json; charset=latin-1", ""):
        headers = {"Content-Type": media}
        recorder.send(f"media type {media}", "POST", TEXT, {"prompt": "a"}, headers=headers)


def routes(recorder: Recorder) -> None:
    """What tells of the server, what is not there, and what takes another method."""
    gets = ("/health", "/v1/health", "/health/live", "/v1/models", "/v1/models/tiny", "/props")
    for path in (*gets, "/v1/models/nobody", "/openapi.json", "/", "/v2", "/v1/chat", "/health/"):
        recorder.send(f"GET {path}", "GET", path)
    recorder.send("GET /manage/state", "GET", "/manage/state", shape=True)
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
        recorder.send(f"{method} {CHAT}", method, CHAT)
    for path in ("/health", "/props", "/v1/models", "/openapi.json", "/v1/streams/x"):
        recorder.send(f"POST {path}", "POST", path, {})
    for name, headers in (
        ("own request id", {"X-Request-Id": "mine-1"}),
        ("bad request id", {"X-Request-Id": "x" * 129}),
        ("foreign host", {"Host": "example.com"}),
        ("foreign origin", {"Origin": "http://example.com"}),
    ):
        recorder.send(name, "GET", "/v1/models", headers=headers)
    for name, raw in (("no HTTP", b"hello\r\n\r\n"), ("no length", b"POST / HTTP/1.1\r\n\r\n")):
        recorder.keep(name, _raw(recorder, raw))


def _raw(recorder: Recorder, raw: bytes) -> Answer:
    host, _, port = recorder.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        wire.sendall(raw)
        wire.shutdown(socket.SHUT_WR)
        head, _, body = b"".join(iter(lambda: wire.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = [(k.lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]
    return Answer(int(first.split()[1]), headers, body)


def texts(recorder: Recorder) -> None:
    """Ids from text and text from ids."""
    chat = {"messages": [{"role": "user", "content": "one 東京 🙂"}]}
    tokenize: tuple[dict[str, Any], ...] = (
        *({"content": "one 東京"}, {"prompt": "one", "return_token_strs": True}, chat, {}),
        *({"content": "<|im_end|>x"}, {"content": "é", "with_pieces": True}, {"content": ""}),
        *(
            {"content": "a", "prompt": "b"},
            {"content": 1},
            {"content": "a", "parse_special": False},
        ),
        {"content": "a", "model": "nobody"},
    )
    detokenize: tuple[dict[str, Any], ...] = (
        *({"tokens": [104, 105]}, {"tokens": []}, {"tokens": [258, 255, 195]}, {}),
        *({"tokens": [400]}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [1.5]}),
    )
    templates: tuple[dict[str, Any], ...] = (
        *(chat, chat | {"add_generation_prompt": False}, {}, {"messages": []}),
        *(chat | {"continue_final_message": True}, chat | {"chat_template_kwargs": {"tools": 1}}),
    )
    bodies = {"/tokenize": tokenize, "/detokenize": detokenize, "/apply-template": templates}
    for path, some in bodies.items():
        for number, body in enumerate(some):
            recorder.send(f"{path} {number}", "POST", path, body)


_COUNTED = {"seed": 7, "temperature": 1, "max_tokens": 12, "ignore_eos": True, "stream": True}


def durable(recorder: Recorder) -> None:
    """Streams that can be found again: by conversation, by key, by byte and by event."""
    chat = {"messages": [{"role": "user", "content": "Äpfel"}]} | _COUNTED
    recorder.send("conversation", "POST", CHAT, chat, headers={_CONVERSATION: "one"})
    first = recorder.send("replaces it", "POST", CHAT, chat, headers={_CONVERSATION: "one"})
    pair = {"prompt": ["ab", "cd"], "n": 2} | _COUNTED | {"stream_options": {"include_usage": True}}
    both = {_CONVERSATION: "two", _KEY: "key two"}
    second = recorder.send("conversation and key", "POST", TEXT, pair, headers=both)
    for name, body, headers in (
        ("key", {"prompt": "ef", "return_progress": True} | _COUNTED, {_KEY: "key"}),
        ("key, whole", {"prompt": "ef"} | _COUNTED | {"stream": False}, {_KEY: "key whole"}),
        ("key again", {"prompt": "ef", "return_progress": True} | _COUNTED, {_KEY: "key"}),
        ("key, whole, again", {"prompt": "ef"} | _COUNTED | {"stream": False}, {_KEY: "key whole"}),
        ("key, another body", {"prompt": "xx"} | _COUNTED, {_KEY: "key"}),
        ("key, not attached", {"prompt": "ef", "attach": False} | _COUNTED, {_KEY: "key"}),
        ("key too long", {"prompt": "ef"} | _COUNTED, {_KEY: "k" * 256}),
        ("conversation empty", {"prompt": "ef"} | _COUNTED, {_CONVERSATION: ""}),
    ):
        recorder.send(f"durable: {name}", "POST", TEXT, body, headers=headers)
    for name, answer in (("one", first), ("two", second)):
        _by_byte(recorder, name, answer)
        _by_event(recorder, name, answer)
    ids: tuple[Any, ...] = (["one", "two", "nobody"], [], "one", [1, "", None], ["x"] * 1001)
    for number, names in enumerate(ids):
        wanted = {"conversation_ids": names}
        recorder.send(f"lookup {number}", "POST", "/v1/streams/lookup", wanted)
    recorder.send("lookup, no JSON", "POST", "/v1/streams/lookup", b"{")
    _ended(recorder, first, second)


def _by_byte(recorder: Recorder, name: str, answer: Answer) -> None:
    size, fourth = len(answer.body), 0
    for _ in range(4):  # 110 bytes on, the ids of that frame lie behind
        fourth = answer.body.index(b"\n\n", fourth) + 2
    places = ("", 0, 1, fourth, fourth + 110, size, size + 1, "-1", "x", "0&from=1")
    for number, place in enumerate(places):
        path = f"/v1/stream/{name}?from={place}"
        recorder.send(f"{name} by byte {number}", "GET", path)
    recorder.send(f"{name} by parameter", "GET", f"/v1/stream?conv_id={name}&from={fourth}")
    pinned = f"/v1/stream/{name}?stream_id="
    recorder.send(f"{name} pinned", "GET", pinned + answer.stream_id + f"&from={fourth}")
    recorder.send(f"{name} pinned to another", "GET", pinned + "other")


def _by_event(recorder: Recorder, name: str, answer: Answer) -> None:
    path = f"/v1/streams/{answer.stream_id}"
    recorder.send(f"{name} state", "GET", path)
    for number, query in enumerate((
        *("", "?after=3", "?after=999", "?after=x", "?after=other:3", "?view=wire"),
        *("?view=wire&after=2", "?view=wire&after=0.0", "?after=2.77", "?view=wire&after=4.0"),
    )):  # fmt: skip
        recorder.send(f"{name} events {number}", "GET", f"{path}/events{query}")
    last = {"Last-Event-Id": f"{answer.stream_id}:2"}
    recorder.send(f"{name} last event id", "GET", f"{path}/events?view=wire", headers=last)
    for number, query in enumerate(("", "?limit=2", "?limit=0", "?wait=99", "?after=5&limit=1")):
        accept = {"Accept": "application/json"}
        recorder.send(f"{name} page {number}", "GET", f"{path}/events{query}", headers=accept)


def _ended(recorder: Recorder, first: Answer, second: Answer) -> None:
    """Stopped, forgotten, replaced, and those that never were."""
    recorder.send("cancel an ended one", "POST", f"/v1/streams/{first.stream_id}/cancel")
    for name, path in (
        ("by id", f"/v1/streams/{first.stream_id}"),
        ("by conversation", "/v1/stream/two"),
        ("unknown", "/v1/stream/nobody"),
        ("no name", "/v1/stream"),
        ("unknown id", "/v1/streams/nobody"),
    ):
        recorder.send(f"delete {name}", "DELETE", path)
    recorder.send("deleted state", "GET", f"/v1/streams/{first.stream_id}")
    recorder.send("deleted bytes", "GET", "/v1/stream/two")
    recorder.send("deleted events", "GET", f"/v1/streams/{second.stream_id}/events")
    recorder.send("cancel an unknown one", "POST", "/v1/streams/nobody/cancel")
    long = {"prompt": "ab"} | _COUNTED | {"max_tokens": 1000}
    with recorder.open("POST", TEXT, long, {_CONVERSATION: "long"}) as reply:
        begun = reply.read1(1000)
        answer = answer_of(reply, begun)
        path = f"/v1/streams/{answer.stream_id}"
        recorder.send("cancel", "POST", f"{path}/cancel", shape=True)
        rest = reply.read()
    recorder.keep("cancelled", answer._replace(body=begun + rest), shape=True)
    recorder.send("cancelled bytes", "GET", "/v1/stream/long", shape=True)
    recorder.send("cancelled state", "GET", path, shape=True)
    with recorder.open("POST", TEXT, long, {_CONVERSATION: "again"}) as reply:
        begun = reply.read1(1000)
        other = {"prompt": "cd"} | _COUNTED
        recorder.send("replacing", "POST", TEXT, other, headers={_CONVERSATION: "again"})
        answer = answer_of(reply, begun + reply.read())
    recorder.keep("replaced", answer, shape=True)


def keys(recorder: Recorder) -> None:
    """A server with keys: who may enter, and whose streams one sees."""
    chat = {"messages": [{"role": "user", "content": "a"}]} | _COUNTED
    mine = {"Authorization": "Bearer first"}
    recorder.send("right key", "POST", CHAT, chat, headers=mine | {_CONVERSATION: "mine"})
    recorder.send("no key", "POST", CHAT, chat)
    recorder.send("wrong key", "GET", "/v1/models", headers={"Authorization": "Bearer nobody"})
    recorder.send("other header", "GET", "/v1/models", headers={"X-Api-Key": "second"})
    recorder.send("another's stream", "GET", "/v1/stream/mine", headers={"X-Api-Key": "second"})
    recorder.send("own stream", "GET", "/v1/stream/mine", headers=mine)
    recorder.send("health without a key", "GET", "/health")
    recorder.send("too large", "POST", TEXT, b" " * 200_001, headers=mine)


def queued(recorder: Recorder) -> None:
    """One runs, one waits and hears how it stands, and a third is refused."""
    key = {"Authorization": "Bearer first"}
    long = {"prompt": "ab", "logprobs": 0, "n": 4} | _COUNTED | {"max_tokens": 1000}
    waiting = {"prompt": "cd", "return_progress": True, "sse_ping_interval": 1} | _COUNTED
    with recorder.open("POST", TEXT, long, key) as running:
        while b"token_logprobs" not in running.read1(1 << 16):
            pass
        with recorder.open("POST", TEXT, waiting, key) as second:
            begun = second.read1(1 << 16)
            body = {"prompt": "ef"} | _COUNTED
            recorder.send("queue is full", "POST", TEXT, body, headers=key)
            assert running.read().endswith(b"[DONE]\n\n")
            recorder.keep("waited", answer_of(second, begun + second.read()))


CORPORA = (
    (
        ("--max-num-seqs", "8"),
        (generations, long_prompts, bad_bodies, routes, texts, durable),
    ),
    (
        (
            *("--max-num-seqs", "1", "--max-num-queued-reqs", "4", "--api-key", "first"),
            *("--api-key", "second", "--max-body-bytes", "200000"),
        ),
        (keys, queued),
    ),
)
"""Flags of each server, and what is sent to it."""
