"""The ollama package, untouched, against a real server."""

import json
import os
from typing import Any

import pytest

ollama = pytest.importorskip("ollama")

MODEL = "headrace-mini"
PULLED = "someone/tiny"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 200}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def client() -> Any:
    return ollama.Client(host=os.environ["HEADRACE_TEST_URL"])


def get_weather(city: str) -> str:
    """Tells the weather in a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


def test_a_streamed_chat_says_what_a_whole_one_does(client: Any) -> None:
    whole = client.chat(MODEL, HELLO, options=GREEDY)
    parts = list(client.chat(MODEL, HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content != ""
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == whole.done_reason == "stop"
    assert parts[-1].eval_count == whole.eval_count > 0 < whole.total_duration


def test_generate_answers_a_question_and_goes_on_with_a_text(client: Any) -> None:
    asked = client.generate(MODEL, "Hello", options=GREEDY)
    assert asked.response == client.chat(MODEL, HELLO, options=GREEDY).message.content
    raw = client.generate(MODEL, "1, 2, 3", raw=True, options=GREEDY | {"num_predict": 4})
    assert (raw.done_reason, raw.eval_count) == ("length", 4)
    assert client.generate(MODEL).done_reason == "load"


def test_a_schema_is_followed(client: Any, grammars: None) -> None:
    answer = client.chat(MODEL, HELLO, format=SCHEMA, options=GREEDY)
    assert json.loads(answer.message.content)["size"] in (1, 2)


def test_a_function_is_called_and_its_result_read(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY).message
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    streamed = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY, stream=True)
    assert [c for part in streamed for c in part.message.tool_calls or ()] == [call]
    result = {"role": "tool", "tool_name": "get_weather", "content": '{"weather": "sunny"}'}
    messages += [called, result]
    answer = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY)
    assert "sunny" in answer.message.content


def test_thinking_stands_apart(client: Any) -> None:
    question = [{"role": "user", "content": "What is 23 + 45?"}]
    thought = client.chat(MODEL, question, think=True, options=GREEDY).message
    assert thought.thinking and "68" in thought.content
    assert not client.chat(MODEL, question, think=False, options=GREEDY).message.thinking


def test_models_are_listed_and_shown(client: Any) -> None:
    assert [it.model for it in client.list().models] == [MODEL]
    assert [it.model for it in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert shown.template and shown.details.format == "safetensors"


def test_a_request_that_asks_nothing_loads_or_unloads(client: Any) -> None:
    for ask in (client.generate, client.chat):
        assert ask(MODEL).done_reason == "load"
        assert ask(MODEL, keep_alive=0).done_reason == "unload"
        parts = list(ask(f"{MODEL}:latest", keep_alive="0s", stream=True))
        assert [part.done_reason for part in parts] == ["unload"]


def test_vectors_come_in_the_order_of_their_texts(client: Any) -> None:
    both = client.embed(MODEL, ["one", "two"]).embeddings
    assert len(both) == 2 and list(both[0]) != list(both[1])
    assert client.embed(MODEL, "two").embeddings[0] == pytest.approx(both[1], abs=1e-5)


def test_a_model_is_pulled_asked_and_deleted(client: Any) -> None:
    parts = list(client.pull(PULLED, stream=True))
    assert (parts[0].status, parts[-1].status) == ("pulling manifest", "success")
    sized = [part for part in parts if part.total]
    assert sized[-1].completed == sized[-1].total and sized[0].digest.startswith("sha256:")
    assert client.generate(PULLED, "one", raw=True, options={"num_predict": 2}).eval_count == 2
    assert PULLED in [it.model for it in client.list().models]
    assert client.pull(f"hf.co/{PULLED}").status == "success"  # it is here
    assert client.delete(PULLED).status == "success"
    with pytest.raises(ollama.ResponseError, match="was not found"):
        client.generate(PULLED, "one", raw=True)
    with pytest.raises(ollama.ResponseError, match="someone/else is not on the hub") as refused:
        client.pull("someone/else")
    assert refused.value.status_code == 404


def test_errors_are_those_of_the_package(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="Model 'nope' was not found") as refused:
        client.chat("nope", HELLO, stream=False)
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="Model 'nope' was not found"):
        client.delete("nope")
    with pytest.raises(ollama.ResponseError, match="the routes below /api are"):
        client.copy("nope", "other")
