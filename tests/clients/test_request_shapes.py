"""The requests of Cline and Zed, as their sources write them, and what their parsers need.

Both are programs with a window, so their requests are written here by hand: of Cline 4.1, which
uses the AI SDK, and of Zed in autumn 2026, whose parsers are strict types in Rust. One line or
event that such a type does not fit ends the whole answer.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

MODEL = "headrace-mini"
CLINE = {"User-Agent": "Cline/4.1.13", "HTTP-Referer": "https://cline.bot", "X-Title": "Cline"}
ZED = {"User-Agent": "Zed/0.210.0"}
PIXEL = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
QUESTION = "What is the weather in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = {"city": "Paris"}
SYSTEM = {"role": "system", "content": "You are an agent in an editor."}


@pytest.fixture(scope="module", params=[CLINE, ZED], ids=["Cline", "Zed"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    url = os.environ["HEADRACE_TEST_URL"]
    key = {"Authorization": "Bearer unused"}
    with httpx.Client(base_url=url, headers=request.param | key, timeout=60) as made:
        yield made


def is_zed(client: Any) -> bool:
    return str(client.headers["user-agent"]).startswith("Zed")


def lines_of(client: Any, path: str, body: dict[str, Any], **headers: str) -> list[str]:
    with client.stream("POST", path, json=body, headers=headers) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
    return list(text.splitlines())


def chunks_of(client: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a chat. Zed skips every line that does not begin with `data: `."""
    data = [line[6:] for line in lines_of(client, path, body) if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    chunks: list[dict[str, Any]] = [json.loads(line) for line in data]
    for chunk in chunks:
        assert type(chunk["created"]) is int and chunk["created"] < 2**32
        assert chunk["model"] and chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            assert type(choice["index"]) is int and type(choice["delta"]) is dict
            assert choice["delta"].get("role") in (None, "assistant")
            assert all(type(call["index"]) is int for call in choice["delta"].get("tool_calls", ()))
    return chunks


def called_in(chunks: list[dict[str, Any]]) -> tuple[str, str, Any]:
    """The id, the name and the arguments of the only call."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    (first,) = [call for call in calls if call.get("id")]
    text = "".join(call["function"].get("arguments") or "" for call in calls)
    assert first["function"]["name"] == FUNCTION["name"]
    return first["id"], first["function"]["name"], json.loads(text)


def chat_body(client: Any, path: str) -> dict[str, Any]:
    """Return the first body that the client sends to a chat with tools."""
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": QUESTION}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": True, "tools": TOOLS}
    if path.startswith("/api/v0"):
        return body | {"temperature": 0.0, "stop": [], "tool_choice": "auto"}
    body["stream_options"] = {"include_usage": True}
    if is_zed(client):
        more = {"max_completion_tokens": 200, "parallel_tool_calls": False}
        return body | more | {"temperature": 0.0, "prompt_cache_key": "a-thread", "stop": []}
    messages[1]["content"] = [{"type": "text", "text": QUESTION}]
    return body | {"max_tokens": 200, "temperature": 0, "tool_choice": "auto"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/v0/chat/completions"])
def test_a_chat_calls_a_tool_and_reads_its_result(client: Any, path: str) -> None:
    body = chat_body(client, path)
    chunks = chunks_of(client, path, body)
    id, name, arguments = called_in(chunks)
    assert arguments == ARGUMENTS
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "tool_calls"
    if "stream_options" in body:
        usage = chunks[-1]["usage"]
        assert all(type(usage[name]) is int for name in ("prompt_tokens", "completion_tokens"))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    call = {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(ARGUMENTS)},
    }
    reply = {"role": "assistant", "content": None if is_zed(client) else "", "tool_calls": [call]}
    result = {"role": "tool", "content": "sunny", "tool_call_id": id}
    body["messages"] += [reply, result]
    told = chunks_of(client, path, body)
    assert "".join(choice["delta"].get("content") or "" for it in told for choice in it["choices"])


def test_an_image_for_a_model_that_reads_text_is_refused_with_a_message(client: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{PIXEL}"}}
    parts = [{"type": "text", "text": "Look"}, image]
    body = chat_body(client, "/v1") | {"messages": [{"role": "user", "content": parts}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "takes text only" in answer.json()["error"]["message"]


def test_lists_of_models_fit_their_types(client: Any) -> None:
    listed = client.get("/v1/models", headers={"Accept": "application/json"}).json()["data"]
    assert MODEL in [entry["id"] for entry in listed]
    (entry,) = [it for it in client.get("/api/v0/models").json()["data"] if it["id"] == MODEL]
    assert entry["type"] in ("llm", "vlm", "embeddings") and entry["object"] == "model"
    assert entry["compatibility_type"] in ("gguf", "mlx") and type(entry["publisher"]) is str
    assert entry["state"] == "loaded" and "tool_use" in entry["capabilities"]
    assert entry["loaded_context_length"] == entry["max_context_length"] > 0
    assert type(entry["arch"]) is str and type(entry["quantization"]) is str


def test_ollamas_lists_fit_their_types(client: Any) -> None:
    (entry,) = [it for it in client.get("/api/tags").json()["models"] if it["name"] == MODEL]
    assert all(type(entry[name]) is str for name in ("modified_at", "digest"))
    assert type(entry["size"]) is int and entry["size"] > 0
    names = ("format", "family", "parameter_size", "quantization_level")
    assert all(type(entry["details"][name]) is str for name in names)
    shown = client.post("/api/show", json={"model": MODEL}).json()
    info = shown["model_info"]
    assert "tools" in shown["capabilities"]
    assert info[f"{info['general.architecture']}.context_length"] > 0


def test_ollamas_chat_calls_a_tool_and_reads_its_result(client: Any) -> None:
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": QUESTION}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": True, "tools": TOOLS}
    if is_zed(client):
        unset = dict.fromkeys(("num_predict", "top_p"))
        options = {"num_ctx": 4096, "stop": [], "temperature": 0.0} | unset
        body |= {"keep_alive": -1, "options": options, "think": None}
    else:
        body["options"] = {"num_ctx": 4096, "temperature": 0}
    calls: list[dict[str, Any]] = []
    for line in told_by_ollama(client, body):
        calls += line["message"].get("tool_calls") or []
    (call,) = calls
    assert call["function"]["name"] == FUNCTION["name"]
    assert call["function"]["arguments"] == ARGUMENTS and type(call["id"]) is str
    reply: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_name": FUNCTION["name"], "content": "sunny"}
    if is_zed(client):
        reply["thinking"] = None
    else:
        result["tool_call_id"] = call["id"]
    messages += [reply, result]
    assert "".join(line["message"]["content"] for line in told_by_ollama(client, body))


def told_by_ollama(client: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a chat. Each must be an object: Zed does not even skip an empty line."""
    lines = [json.loads(line) for line in lines_of(client, "/api/chat", body)]
    for line in lines:
        assert type(line["model"]) is type(line["created_at"]) is str
        assert line["message"]["role"] == "assistant" and type(line["message"]["content"]) is str
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["prompt_eval_count"] > 0 < lines[-1]["eval_count"]
    return lines


EVENTS = {
    *("message_start", "message_delta", "message_stop", "ping", "error"),
    *("content_block_start", "content_block_delta", "content_block_stop"),
}
DELTAS = {"text_delta", "thinking_delta", "signature_delta", "input_json_delta"}


def test_messages_call_a_tool_with_events_that_their_types_know(client: Any) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": QUESTION}
    tool = {"name": FUNCTION["name"], "description": "Tells", "input_schema": PARAMETERS}
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": [text | cached]}],
        "tools": [tool | cached],
        "tool_choice": {"type": "auto"},
        "system": SYSTEM["content"]
        if is_zed(client)
        else [{"type": "text", "text": "Hi"} | cached],
        "temperature": 0,
        "stream": True,
    }
    beta = "fine-grained-tool-streaming-2025-05-14,interleaved-thinking-2025-05-14"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": beta, "x-api-key": "unused"}
    lines = lines_of(client, "/v1/messages", body, **headers)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert {event["type"] for event in events} <= EVENTS
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} <= DELTAS
    start = events[0]["message"]
    assert start["role"] == "assistant" and start["usage"]["input_tokens"] > 0
    given = "".join(delta.get("partial_json", "") for delta in deltas)
    assert json.loads(given) == ARGUMENTS
    (end,) = [event for event in events if event["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "tool_use" and end["usage"]["output_tokens"] > 0
