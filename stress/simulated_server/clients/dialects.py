"""The generation routes of all APIs, streamed and unary; each answer is compared whole."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from detangle import choice, flip, uniform

from stress.simulated_server.clients.common import (
    Backoff,
    allow_failure,
    is_later,
    names_of,
    read_frame,
    refused,
)
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.processes import logprob_of
from stress.simulated_server.requests import MODEL, Answer, Request
from stress.simulated_server.world import World
from stress.simulator.fake_runner import VOCABULARY


@dataclass
class Parsed:
    """An answer as one dialect writes it, streamed or whole."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    # The finish reason of each choice, in the words of the reference.
    reasons: dict[int, str] = field(default_factory=dict)
    # The stop string of each choice, if the dialect names it.
    stops: dict[int, str] = field(default_factory=dict)
    num_tokens: int | None = None
    # The tokens of each choice with their log probabilities.
    logprobs: defaultdict[int, list[tuple[str, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # The code of the error with which the answer ends.
    code: str = ""
    is_done: bool = False
    # The progress of the prompt, as (processed, total).
    progress: list[tuple[int, int]] = field(default_factory=list)

    def take(self, frame: dict[str, Any], dialect: "Dialect") -> None:
        """Add one frame of a stream, or a whole answer."""
        if error := frame.get("error"):
            self.code = error["code"] if isinstance(error, dict) else frame["code"]
            return
        if progress := frame.get("prompt_progress"):
            self._advance(progress)
        # The progress is that of the first choice. After a kill, another choice may be ahead of it.
        had_text = self.texts.get(0)
        dialect.take(self, frame)
        if self.progress and not had_text and self.texts.get(0):
            processed, total = self.progress[-1]
            assert processed == total, f"text after {processed} of {total} prompt tokens"

    def _advance(self, progress: dict[str, int]) -> None:
        now = progress["processed"], progress["total"]
        before = self.progress[-1] if self.progress else (0, now[1])
        assert before[0] <= now[0] <= now[1] == before[1], f"progress {now} after {before}"
        self.progress.append(now)


class Dialect(NamedTuple):
    """One generation route: its body, and how it writes an answer."""

    route: str
    body: Callable[[Request, bool], dict[str, Any]]
    take: Callable[[Parsed, dict[str, Any]], None]
    # Whether a stream is lines of JSON instead of server-sent events.
    has_lines: bool = False
    has_choices: bool = False


def _chat(request: Request, is_stream: bool) -> dict[str, Any]:
    body = request.body(is_stream)
    if request.has_logprobs:
        body |= {"logprobs": True, "top_logprobs": 2}
    if request.has_tools:
        body["tools"] = [{"type": "function", "function": {"name": "look"}}]
    return body | {"stream_options": {"include_usage": True}} if is_stream else body


def _completion(request: Request, is_stream: bool) -> dict[str, Any]:
    body = _chat(request, is_stream)
    body |= {"echo": True} if request.has_echo else {}
    for name in ("messages", "top_logprobs"):
        body.pop(name, None)
    return body | {"prompt": request.content} | ({"logprobs": 2} if request.has_logprobs else {})


def _take_choices(parsed: Parsed, frame: dict[str, Any]) -> None:
    for it in frame["choices"]:
        message = it.get("delta") or it.get("message") or it
        index = it["index"]
        parsed.texts[index] += message.get("content") or message.get("text") or ""
        if logprobs := it.get("logprobs"):
            pairs = (
                [(it["token"], it["logprob"]) for it in logprobs["content"] or ()]
                if "content" in logprobs
                else zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
            )
            parsed.logprobs[index] += pairs
        if reason := it["finish_reason"]:
            parsed.reasons[index] = reason
            parsed.stops[index] = it["stop_reason"] if isinstance(it["stop_reason"], str) else ""
    if usage := frame.get("usage"):
        parsed.num_tokens = usage["completion_tokens"]


def _message(request: Request, is_stream: bool) -> dict[str, Any]:
    body = request.body(is_stream)
    stops = body.pop("stop", None)
    return body | ({"stop_sequences": stops} if stops else {})


_MESSAGE_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


def _take_message(parsed: Parsed, frame: dict[str, Any]) -> None:
    ended = frame
    match frame["type"]:
        case "content_block_delta":
            parsed.texts[0] += frame["delta"]["text"]
            return
        case "message":
            parsed.texts[0] += "".join(block["text"] for block in frame["content"])
        case "message_delta":
            ended = frame["delta"]
        case "message_stop":
            parsed.is_done = True
            return
        case _:
            return
    parsed.reasons[0] = _MESSAGE_REASONS[ended["stop_reason"]]
    parsed.stops[0] = ended["stop_sequence"] or ""
    parsed.num_tokens = frame["usage"]["output_tokens"]


def _response(request: Request, is_stream: bool) -> dict[str, Any]:
    body = request.body(is_stream)
    body["input"] = request.content
    body["max_output_tokens"] = body.pop("max_tokens")
    del body["messages"]
    return body


_RESPONSE_REASONS = {"completed": "stop", "incomplete": "length"}


def _take_response(parsed: Parsed, frame: dict[str, Any]) -> None:
    response = frame.get("response", frame)
    if frame.get("type") == "response.output_text.delta":
        parsed.texts[0] += frame["delta"]
    if response.get("status") in ("failed", "cancelled"):
        parsed.code = response["error"]["code"]
    if reason := _RESPONSE_REASONS.get(response.get("status", "")):
        if response.get("object") != "response":
            return
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        streamed = parsed.texts[0]
        assert "type" not in frame or text == streamed, f"{text!r} after the pieces {streamed!r}"
        parsed.texts[0] = text
        parsed.reasons[0] = reason
        parsed.num_tokens = response["usage"]["output_tokens"]
        parsed.is_done = True


def _ollama_chat(request: Request, is_stream: bool) -> dict[str, Any]:
    options = {"seed": request.seed, "num_predict": request.max_tokens}
    if request.stops:
        options["stop"] = list(request.stops)  # type: ignore[assignment]
    messages = [{"role": "user", "content": request.content}]
    return {"model": MODEL, "messages": messages, "stream": is_stream, "options": options}


def _take_ollama(parsed: Parsed, frame: dict[str, Any]) -> None:
    parsed.texts[0] += frame["message"]["content"]
    if frame["done"]:
        parsed.reasons[0] = frame["done_reason"]
        parsed.num_tokens = frame["eval_count"]
        parsed.is_done = True


def _llama(request: Request, is_stream: bool) -> dict[str, Any]:
    body = request.body(is_stream)
    body["prompt"] = request.content
    body["n_predict"] = body.pop("max_tokens")
    del body["messages"]
    return body


_LLAMA_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


def _take_llama(parsed: Parsed, frame: dict[str, Any]) -> None:
    parsed.texts[0] += frame["content"]
    if frame["stop"]:
        parsed.reasons[0] = _LLAMA_REASONS[frame["stop_type"]]
        parsed.stops[0] = frame["stopping_word"]
        parsed.num_tokens = frame["tokens_predicted"]
        parsed.is_done = True


RESPONSES = Dialect("/v1/responses", _response, _take_response)
DIALECTS = (
    Dialect("/v1/chat/completions", _chat, _take_choices, has_choices=True),
    Dialect("/v1/completions", _completion, _take_choices, has_choices=True),
    Dialect("/v1/messages", _message, _take_message),
    RESPONSES,
    Dialect("/api/chat", _ollama_chat, _take_ollama, has_lines=True),
    Dialect("/completion", _llama, _take_llama),
)


def parse(dialect: Dialect, body: bytes) -> Parsed:
    """Read the body of a streamed answer as far as it has arrived."""
    parsed = Parsed()
    *whole, _ = body.split(b"\n" if dialect.has_lines else b"\n\n")
    for frame in whole:
        data = frame if dialect.has_lines else read_frame(frame)[1]
        if data == b"[DONE]":
            parsed.is_done = True
        elif data:
            found = json.loads(data)
            # The last chunk of /completion precedes the end of the log, which may take a while to
            # be stored. Heartbeats fill this time.
            is_beat = dialect.route == "/completion" and found.get("content") == ""
            is_over = parsed.code or parsed.is_done
            assert not is_over or (is_beat and not found["stop"]), f"{data!r} after the end"
            parsed.take(found, dialect)
    return parsed


def vary(request: Request, dialect: Dialect) -> Request:
    """Choose whether a request has several choices and stop strings."""
    if dialect.has_choices and flip(0.3):
        request = request._replace(num_choices=2)
    if dialect.has_choices and flip(0.3):
        return request._replace(has_logprobs=True)
    if dialect.body is _completion and flip(0.3):
        return request._replace(has_echo=True)
    if dialect.body is _chat and flip(0.3):
        return request._replace(has_tools=True, content="x")
    # The route /v1/responses shows neither which stop string ended an answer nor several choices.
    if flip(0.3):
        request = request._replace(stops=choice((("7",), ("A", "B"), ("12", "%&"))))
    return request


def check(world: World, request: Request, dialect: Dialect, parsed: Parsed) -> None:
    """Compare a whole answer with the reference."""
    if parsed.code:
        allow_failure(world, request, parsed.code)
        return
    assert sorted(parsed.reasons) == [*range(request.num_choices)], f"{request.key}: {parsed}"
    num_tokens = 0
    for index, reason in parsed.reasons.items():
        text = parsed.texts[index]
        if request.has_echo:
            assert text.startswith(request.content), f"{text!r} does not repeat {request.content!r}"
            text = text.removeprefix(request.content)
            world.counts["answers with their prompts"] += 1
        world.compare(request, text, reason, index)
        answer = request.answer(world.model.tokenizer, index)
        num_tokens += answer.num_tokens
        found = parsed.stops.get(index, answer.stop)
        assert found == answer.stop, f"{request.key}: stop {found!r} instead of {answer.stop!r}"
        if request.has_logprobs:
            _check_logprobs(world, parsed.logprobs[index], answer)
    found_tokens = num_tokens if parsed.num_tokens is None else parsed.num_tokens
    assert found_tokens == num_tokens, f"{request.key}: {found_tokens} of {num_tokens} tokens"
    world.counts[f"answers of {dialect.route}"] += 1
    if parsed.progress:
        world.counts["answers with progress"] += 1


def _check_logprobs(world: World, pairs: list[tuple[str, float]], answer: Answer) -> None:
    """Check that each token has its log probability, even if several engines drew the tokens."""
    tokenizer = world.model.tokenizer
    known = {tokenizer.token_text(id): logprob_of(id) for id in range(VOCABULARY + 3)}
    # The token that ends an answer has no text and no entry.
    num_tokens = answer.num_tokens - (answer.finish_reason == "stop")
    assert len(pairs) == num_tokens, f"{len(pairs)} log probabilities of {answer}"
    for token, logprob in pairs:
        assert logprob == known[token], f"{token!r} has {logprob}, not {known[token]}"
    world.counts["answers with log probabilities"] += 1


async def asks_for_a_stream(world: World, request: Request) -> None:
    """Read a streamed answer; repeat the POST from the start after each break."""
    dialect = choice(DIALECTS)
    request = vary(request, dialect)
    body = dialect.body(request, True)
    if flip(0.5):
        body["return_progress"] = True
    names = names_of(request) if flip(0.7) else {}
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", dialect.route, names, body)
            status = await connection.begin()
            if status == 200:
                parsed = parse(dialect, await _read_stream(world, connection))
                if parsed.is_done or (parsed.code and not is_later(world, parsed.code)):
                    check(world, request, dialect, parsed)
                    return
            else:
                await refused(world, connection)
        except Broken:
            pass
        await backoff.pause()


async def _read_stream(world: World, connection: Connection) -> bytes:
    """Return the bytes of a streamed answer; read slowly now and then."""
    body = b""
    chunks = connection.chunks()
    is_slow = flip(0.2)
    while True:
        try:
            body += await world.in_time(connection, anext(chunks))
        except StopAsyncIteration:
            return body
        if is_slow and flip(0.2):
            await asyncio.sleep(uniform(0.0, 3.0))


async def repeats_the_request(world: World, request: Request) -> None:
    """Repeat a POST with a key until a whole answer arrives."""
    dialect = choice(DIALECTS)
    request = vary(request, dialect)
    body = dialect.body(request, False)
    has_heartbeats = flip(0.3)
    if has_heartbeats:
        body["heartbeat"] = True
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", dialect.route, names_of(request), body)
            status = await connection.begin()
            if has_heartbeats and status == 200:
                answer = await _read_stream(world, connection)
            else:
                answer = await connection.read()
            parsed = Parsed()
            parsed.take(json.loads(answer), dialect)
            if not (is_later(world, parsed.code) or status in (429, 529)):
                check(world, request, dialect, parsed)
                return
        except Broken:
            pass
        await backoff.pause()
