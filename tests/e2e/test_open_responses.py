"""Tests with the cases of Open Responses (openresponses.org) over HTTP.

Each case checks the fields and types of the response and of each event, and the events' order.
"""

import json
from types import NoneType
from typing import Any

import httpx
import pytest

from tools.harness.servers import ServerProcess

Json = dict[str, Any]
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ASK_WEATHER: Json = {"input": "What is the weather in Paris?", "tools": [WEATHER]}
TEXT, NUMBER, MAYBE_TEXT = (str,), (int, float), (str, NoneType)

RESPONSE: dict[str, tuple[type, ...]] = {
    "id": TEXT,
    "object": TEXT,
    "created_at": (int,),
    "completed_at": (int, NoneType),
    "status": TEXT,
    "incomplete_details": (dict, NoneType),
    "model": TEXT,
    "previous_response_id": MAYBE_TEXT,
    "instructions": MAYBE_TEXT,
    "output": (list,),
    "error": (dict, NoneType),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": TEXT,
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": (int,),
    "temperature": NUMBER,
    "reasoning": (dict, NoneType),
    "usage": (dict, NoneType),
    "max_output_tokens": (int, NoneType),
    "max_tool_calls": (int, NoneType),
    "store": (bool,),
    "background": (bool,),
    "service_tier": TEXT,
    "metadata": (dict,),
    "safety_identifier": MAYBE_TEXT,
    "prompt_cache_key": MAYBE_TEXT,
}
FUNCTION = {
    "type": TEXT,
    "name": TEXT,
    "description": MAYBE_TEXT,
    "parameters": (dict, NoneType),
    "strict": (bool, NoneType),
}
USAGE = {
    "input_tokens": (int,),
    "input_tokens_details": (dict,),
    "output_tokens": (int,),
    "output_tokens_details": (dict,),
    "total_tokens": (int,),
}
_HEAD = {"id": TEXT, "status": TEXT}
ITEMS: dict[str, dict[str, tuple[type, ...]]] = {
    "message": _HEAD | {"role": TEXT, "content": (list,)},
    "reasoning": {"id": TEXT, "summary": (list,)},
    "function_call": _HEAD | {"call_id": TEXT, "name": TEXT, "arguments": TEXT},
}
PARTS: dict[str, dict[str, tuple[type, ...]]] = {
    "output_text": {"text": TEXT, "annotations": (list,), "logprobs": (list,)},
    "reasoning_text": {"text": TEXT},
}
_IN_ITEM = {"item_id": TEXT, "output_index": (int,)}
_IN_PART = _IN_ITEM | {"content_index": (int,)}
_WHOLE = {"response": (dict,)}
EVENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "response.created": _WHOLE,
    "response.in_progress": _WHOLE,
    "response.completed": _WHOLE,
    "response.output_item.added": {"output_index": (int,), "item": (dict,)},
    "response.output_item.done": {"output_index": (int,), "item": (dict,)},
    "response.content_part.added": _IN_PART | {"part": (dict,)},
    "response.content_part.done": _IN_PART | {"part": (dict,)},
    "response.output_text.delta": _IN_PART | {"delta": TEXT, "logprobs": (list,)},
    "response.output_text.done": _IN_PART | {"text": TEXT, "logprobs": (list,)},
    "response.reasoning_text.delta": _IN_PART | {"delta": TEXT},
    "response.reasoning_text.done": _IN_PART | {"text": TEXT},
    "response.function_call_arguments.delta": _IN_ITEM | {"delta": TEXT},
    "response.function_call_arguments.done": _IN_ITEM | {"arguments": TEXT},
}


def check(value: Json, shape: dict[str, tuple[type, ...]]) -> None:
    wrong = {name for name, types in shape.items() if type(value.get(name, "")) not in types}
    assert shape.keys() <= value.keys() and not wrong, (shape.keys() - value.keys(), wrong)


def check_item(item: Json) -> None:
    check(item, ITEMS[item["type"]])
    for part in item.get("content", ()):
        check(part, PARTS[part["type"]])


def check_response(response: Json) -> None:
    check(response, RESPONSE)
    assert response["object"] == "response"
    for item in response["output"]:
        check_item(item)
    for tool in response["tools"]:
        check(tool, FUNCTION)
    if response["usage"] is not None:
        check(response["usage"], USAGE)


def ask(server: ServerProcess, **body: Any) -> Json:
    answer = httpx.post(f"{server.url}/v1/responses", json={"temperature": 0} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    response: Json = answer.json()
    check_response(response)
    assert response["output"] and response["status"] == "completed"
    return response


def streamed(server: ServerProcess, **body: Any) -> list[Json]:
    """Return the events of a stream after checking their fields and order."""
    body = {"temperature": 0, "stream": True} | body
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    events = []
    for frame in answer.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
        check(event, EVENTS[event["type"]])
        events.append(event)
    check_order(events)
    return events


def check_order(events: list[Json]) -> None:
    first, second, *between, last = events
    assert [it["type"].removeprefix("response.") for it in (first, second, last)] == [
        "created",
        "in_progress",
        "completed",
    ]
    for event in (first, second, last):
        check_response(event["response"])
    done: list[Json] = []
    texts: list[str] = []
    for event in between:
        assert event["output_index"] == len(done)
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            item, texts = event["item"], []
            assert item["status"] == "in_progress"
            check(item, ITEMS[item["type"]])
        elif kind == "output_item.done":
            assert event["item"]["id"] == item["id"] and event["item"]["status"] == "completed"
            check_item(event["item"])
            done.append(event["item"])
        else:
            assert event["item_id"] == item["id"]
            texts += [event["delta"]] if kind.endswith(".delta") else []
            whole = event.get("text", event.get("arguments"))
            assert whole in (None, "".join(texts))
    assert last["response"]["output"] == done


def text_of(response: Json) -> str:
    return "".join(part["text"] for part in response["output"][-1]["content"])


def message(role: str, content: Any) -> Json:
    return {"type": "message", "role": role, "content": content}


def test_a_text_is_answered(server: ServerProcess) -> None:
    ask(server, input=[message("user", "Say hello in exactly 3 words.")])


@pytest.mark.parametrize("more", [{}, {"reasoning": {"effort": "low"}}, {"top_logprobs": 2}])
def test_a_text_is_streamed(server: ServerProcess, more: Json) -> None:
    body = {"input": [message("user", "Count from 1 to 5.")]} | more
    last = streamed(server, **body)[-1]["response"]
    assert text_of(last) == text_of(ask(server, **body))


def test_a_system_message_is_read(server: ServerProcess) -> None:
    pirate = message("system", "You are a pirate. Always respond in pirate speak.")
    hello = message("user", "Say hello.")
    both, alone = ask(server, input=[pirate, hello]), ask(server, input=[hello])
    assert both["usage"]["input_tokens"] > alone["usage"]["input_tokens"]


def test_a_tool_is_called_and_its_result_is_used(server: ServerProcess) -> None:
    response = ask(server, **ASK_WEATHER)
    (call,) = response["output"]
    assert (call["type"], json.loads(call["arguments"])) == ("function_call", {"city": "Paris"})
    assert response["tools"] == [WEATHER | {"strict": None}]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny, 21 C"}
    past = [message("user", ASK_WEATHER["input"]), call, result]
    again = ask(server, input=past, tools=[WEATHER])
    assert again["output"][-1]["type"] == "message"


def test_a_tool_call_is_streamed(server: ServerProcess) -> None:
    kinds = [event["type"] for event in streamed(server, **ASK_WEATHER)]
    assert kinds.count("response.function_call_arguments.done") == 1
    assert "response.function_call_arguments.delta" in kinds


def test_a_conversation_is_continued(server: ServerProcess) -> None:
    past = [message("user", "My name is Alice."), message("assistant", "Hello Alice!")]
    asked = message("user", "What is my name?")
    assert ask(server, input=[*past, asked])["usage"]["input_tokens"] > 10
    first = ask(server, input=[past[0]])
    second = ask(server, input=[asked], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    sent_whole = ask(server, input=[past[0], *first["output"], asked])
    assert text_of(second) == text_of(sent_whole)


def test_a_file_is_accepted(server: ServerProcess) -> None:
    file = {"filename": "a.txt", "file_data": "data:text/plain;base64,VGl0bGU6IEZpeHR1cmU="}
    parts = [{"type": "input_text", "text": "What is the title?"}, {"type": "input_file"} | file]
    ask(server, input=[message("user", parts)])
