"""Tests of tools and reasoning over HTTP with headrace-mini, which was trained on both."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx

from headrace import LLM, AsyncClient, Client
from headrace_common.answer import Answer, Piece
from tests.cli.terminal import terminal
from tests.cli.test_chat import piped
from tools.harness.servers import ServerProcess
from tools.harness.sse import data_in

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
    return [chunk["choices"][0] for chunk in data_in(text)]


def test_a_tool_is_called_and_its_result_answered(server: ServerProcess) -> None:
    message = message_of(post(server, BODY))
    assert message["content"] is None and message["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"weather": "sunny"}'}
    said = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
    answer = message_of(post(server, BODY | {"messages": [ASKED, said, result]}))
    assert "sunny" in answer["content"] and answer["finish_reason"] == "stop"


def test_deltas_of_a_tool_call_join_to_the_whole_and_its_id_is_stable(
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


def test_tool_choice_none_prevents_calls(server: ServerProcess) -> None:
    message = message_of(post(server, BODY | {"tool_choice": "none"}))
    assert "tool_calls" not in message and "<tool_call>" not in (message["content"] or "")


def test_reasoning_is_separate_from_the_answer_and_counted(server: ServerProcess) -> None:
    ask = {"role": "user", "content": "What is 12 + 30? /think"}
    answer = post(server, {"messages": [ask], "temperature": 0, "max_tokens": 120})
    message = message_of(answer)
    assert message["content"] == "12 + 30 = 42"
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert "think>" not in message["reasoning"]
    details = answer.json()["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer.json()["usage"]["completion_tokens"]


def test_an_invalid_tool_is_named_in_the_error(server: ServerProcess) -> None:
    nameless = {"type": "function", "function": {"parameters": {}}}
    refused = post(server, BODY | {"tools": [WEATHER, nameless]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[1].function.name"
    named = {"type": "function", "function": {"name": "other"}}
    refused = post(server, BODY | {"tool_choice": named})
    assert refused.json()["error"]["param"] == "tool_choice.function.name"


THOUGHT: dict[str, Any] = {"temperature": 0, "max_tokens": 120}
QUESTION = "What is 12 + 30? /think"


def check_joined(pieces: list[Piece], answer: Answer) -> None:
    """Check that joined pieces equal the whole answer, except for the ids of calls."""
    assert "".join(piece.text for piece in pieces) == answer.text
    assert "".join(piece.reasoning for piece in pieces) == answer.reasoning
    deltas = [delta for piece in pieces for delta in piece.tool_calls]
    whole = [call["function"] for call in answer.tool_calls]
    assert [d["function"]["name"] for d in deltas if "id" in d] == [call["name"] for call in whole]
    for number, call in enumerate(whole):
        said = [d["function"]["arguments"] for d in deltas if d["index"] == number]
        assert "".join(said) == call["arguments"] and len(said) > 1


def test_pieces_carry_reasoning_and_tool_calls_over_http(server: ServerProcess) -> None:
    async def streamed(url: str) -> list[Piece]:
        async with AsyncClient(url) as client:
            return [piece async for piece in client.stream(QUESTION, **THOUGHT)]

    with Client(server.url) as client:
        thinking = client.chat(QUESTION, **THOUGHT)
        assert thinking.reasoning and thinking.text == "12 + 30 = 42"
        check_joined(list(client.stream(QUESTION, **THOUGHT)), thinking)
        stream = client.stream(**BODY)
        pieces, calling = list(stream), stream.answer()
    check_joined(pieces, calling)
    (first,) = [d["id"] for piece in pieces for d in piece.tool_calls if "id" in d]
    assert first == calling.tool_calls[0]["id"]
    check_joined(asyncio.run(streamed(server.url)), thinking)


def test_pieces_carry_reasoning_and_tool_calls_in_process() -> None:
    with LLM.load("headrace-mini", threads=1, max_num_seqs=2) as llm:
        for fields in ({"messages": QUESTION, **THOUGHT}, BODY):
            answer = llm.chat(**fields)
            assert answer.reasoning or answer.tool_calls
            check_joined(list(llm.stream(**fields)), answer)


def test_chat_dims_reasoning_and_shows_tool_calls(server: ServerProcess, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    words = ("chat", "--url", server.url, "-o", "temperature=0")
    with terminal(*words, "-o", f"tools={json.dumps([WEATHER])}", **state) as shown:
        shown.wait_for("> ")
        shown.type(QUESTION)
        thought = shown.wait_for(r"(?s)think\s(.+)\n12 \+ 30 = 42\s+> ")
        assert not any(word in thought for word in ("tool call", "<think>", "</think>"))
        shown.type(ASKED["content"])
        shown.wait_for(r'(?s)tool call: get_weather ─.*"city": ?"Paris".*result of get_weather> ')
        shown.type("rain")
        shown.wait_for("(?s)rain.*> ")
        shown.press_ctrl_d()
        assert shown.wait_until_ended() == 0
    # The thought contains the answer's words, so a frame may show these dimmed, too.
    dimmed = re.findall(r"(?s)\x1b\[2m(.*?)\x1b\[0m", shown.raw)
    undimmed = re.sub(r"(?s)\x1b\[2m.*?\x1b\[0m", "", shown.raw)
    assert "42 + 0" in "".join(dimmed) and "42 + 0" not in undimmed
    assert "12 + 30 = 42" in undimmed
    kept = json.loads((tmp_path / "headrace" / "chats" / "1.json").read_bytes())["messages"]
    assert kept[1] == {"role": "assistant", "content": "12 + 30 = 42"}
    (call,) = kept[3]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert kept[4] == {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    assert kept[5]["role"] == "assistant" and kept[5]["content"]
    alone = piped(words[1:], QUESTION, **state)  # without a terminal, only the text is printed
    assert (alone.stdout, alone.stderr) == ("12 + 30 = 42\n", "")
