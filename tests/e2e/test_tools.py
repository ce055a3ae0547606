"""Tools and reasoning over real HTTP with headrace-mini, which was trained on both."""

import json
from typing import Any

import httpx

from tests.servers import ServerProcess

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
BODY: dict[str, Any] = {
    "messages": [ASKED],
    "tools": [WEATHER],
    "temperature": 0,
    "max_tokens": 120,
}


def post(server: ServerProcess, body: dict[str, Any], **headers: str) -> httpx.Response:
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


def message_of(answer: httpx.Response) -> dict[str, Any]:
    (choice,) = answer.json()["choices"]
    message: dict[str, Any] = choice["message"] | {"finish_reason": choice["finish_reason"]}
    return message


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:5] == "data:"]
    return [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]


def test_a_tool_is_called_and_its_result_answered(server: ServerProcess) -> None:
    message = message_of(post(server, BODY))
    assert message["content"] is None and message["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    told = {"role": "tool", "tool_call_id": call["id"], "content": '{"weather": "sunny"}'}
    said = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
    answer = message_of(post(server, BODY | {"messages": [ASKED, said, told]}))
    assert "sunny" in answer["content"] and answer["finish_reason"] == "stop"


def test_joined_deltas_of_a_call_are_the_whole_and_every_reader_sees_the_same_id(
    server: ServerProcess,
) -> None:
    names = {"X-Conversation-Id": "tools"}
    streamed = post(server, BODY | {"stream": True}, **names)
    chunks = chunks_of(streamed.text)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [call.get("id") is None for call in calls] == [False] + [True] * (len(calls) - 1)
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"city": "Paris"} and len(calls) > 2
    assert chunks[-1]["finish_reason"] == "tool_calls"
    again = httpx.get(f"{server.url}/v1/stream", params={"conv_id": "tools"}, timeout=60)
    assert again.text == streamed.text


def test_no_tools_means_no_calls(server: ServerProcess) -> None:
    message = message_of(post(server, BODY | {"tool_choice": "none"}))
    assert "tool_calls" not in message and "<tool_call>" not in (message["content"] or "")


def test_reasoning_stands_apart_and_is_counted(server: ServerProcess) -> None:
    ask = {"role": "user", "content": "What is 12 + 30? /think"}
    answer = post(server, {"messages": [ask], "temperature": 0, "max_tokens": 120})
    message = message_of(answer)
    assert message["content"] == "12 + 30 = 42"
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert "think>" not in message["reasoning"]
    details = answer.json()["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer.json()["usage"]["completion_tokens"]


def test_a_wrong_tool_is_named(server: ServerProcess) -> None:
    nameless = {"type": "function", "function": {"parameters": {}}}
    refused = post(server, BODY | {"tools": [WEATHER, nameless]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[1].function.name"
    named = {"type": "function", "function": {"name": "other"}}
    refused = post(server, BODY | {"tool_choice": named})
    assert refused.json()["error"]["param"] == "tool_choice.function.name"
