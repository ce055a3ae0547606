"""Tests of tools with a chat template that does not support them, in every dialect."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.test_tools import ASKED, chunks_of, message_of
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import TURNS_TEMPLATE

CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Weather of a city", "parameters": CITIES}
BODY: dict[str, Any] = {
    "messages": [ASKED],
    "tools": [{"type": "function", "function": WEATHER}],
    "temperature": 0,
    "max_tokens": 120,
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("generic") / "turns.jinja"
    template.write_text(TURNS_TEMPLATE)
    with running_server("headrace-mini", "--threads", "1", "--chat-template", str(template)) as it:
        yield it


def post(server: ServerProcess, body: dict[str, Any], path: str = "chat/completions") -> Any:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def test_a_forced_call_fits_the_tools_schema_and_its_result_is_accepted(
    server: ServerProcess,
) -> None:
    answer = post(server, BODY | {"tool_choice": "required"})
    message = message_of(answer)
    assert message["finish_reason"] == "tool_calls"
    assert answer.headers["x-headrace-tools"] == "generic"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    said = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    after = BODY | {"messages": [{"role": "system", "content": "Be brief."}, ASKED, said, result]}
    answered = post(server, after | {"tool_choice": "none"})
    assert answered.status_code == 200 and "x-headrace-tools" not in answered.headers


def test_a_forced_call_streams_the_usual_tool_call_deltas(server: ServerProcess) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    streamed = post(server, BODY | {"tool_choice": named, "stream": True})
    assert streamed.headers["x-headrace-tools"] == "generic"
    chunks = chunks_of(streamed.text)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert not any(chunk["delta"].get("content") for chunk in chunks)
    assert json.loads("".join(call["function"]["arguments"] for call in calls))["city"]
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_a_call_that_is_not_forced_may_be_answered_in_text(server: ServerProcess) -> None:
    for function in (WEATHER, WEATHER | {"strict": True}):
        tool = {"type": "function", "function": function}
        answer = post(server, BODY | {"tools": [tool], "max_tokens": 8})
        assert answer.status_code == 200 and answer.headers["x-headrace-tools"] == "generic"


def test_responses_and_messages_routes_use_generic_tools(server: ServerProcess) -> None:
    shared = {"model": "headrace-mini", "temperature": 0}
    asked: dict[str, Any] = {
        "input": "Weather in Paris?",
        "tools": [{"type": "function", **WEATHER}],
    }
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    response = post(server, shared | asked | {"max_output_tokens": 120}, "responses")
    assert {item["type"] for item in response.json()["output"]} == {"function_call"}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    tool = {"name": "get_weather", "input_schema": CITIES}
    asked = {"messages": [ASKED], "tools": [tool], "tool_choice": choice}
    message = post(server, shared | asked | {"max_tokens": 120}, "messages")
    assert message.json()["stop_reason"] == "tool_use"
    counted = post(server, shared | asked, "messages/count_tokens").json()["input_tokens"]
    usage = message.json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] > 100
    for answer in (response, message):
        assert answer.headers["x-headrace-tools"] == "generic"


def test_generic_tools_are_logged_once_per_model(server: ServerProcess) -> None:
    assert post(server, BODY | {"max_tokens": 1}).status_code == 200
    said = [line for line in server.lines if "chat template that does not support tools" in line]
    assert len(said) == 1 and "WARNING" in said[0] and "headrace-mini" in said[0]
