"""litellm, which other programs put before servers, under every name that fits this one."""

import json
from typing import Any

import litellm
import pytest

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
PROVIDERS = ("openai", "hosted_vllm")
OF_OLLAMA = ("ollama_chat", "ollama")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Any:
    return request.param


def complete(url: str, provider: str, messages: Any = QUESTION, **fields: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    own = {"temperature": 0, "api_base": url, "api_key": "unused", "num_retries": 0}
    return litellm.completion(f"{provider}/headrace-mini", messages, **own | fields)


def test_a_model_answers(url: str, provider: str) -> None:
    answer = complete(url, provider, "Hello")
    assert answer.choices[0].message.content == "Hello! How can I help you?"
    assert answer.usage.completion_tokens > 5


def test_a_tool_is_called_and_its_result_answered(url: str, provider: str) -> None:
    message = complete(url, provider, tools=[WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'}
    (choice,) = complete(url, provider, [*QUESTION, message, result], tools=[WEATHER]).choices
    assert choice.message.content == "The weather in Paris is sunny."


def streamed(url: str, provider: str, *arguments: Any, **fields: Any) -> Any:
    """The message and usage that litellm makes of a stream."""
    usage = {"include_usage": True}
    fields = {"stream": True, "stream_options": usage} | fields
    whole = litellm.stream_chunk_builder(list(complete(url, provider, *arguments, **fields)))
    return whole.choices[0].message, whole.usage


def test_a_tool_is_called_in_a_stream(url: str, provider: str) -> None:
    message, usage = streamed(url, provider, tools=[WEATHER])
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert usage.completion_tokens > 5


def test_reasoning_is_apart_from_the_answer(url: str, provider: str) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message, _ = streamed(url, provider, "What is 23 + 45?", extra_body=thinking)
    assert message.content == "23 + 45 = 68"
    assert "63" in message.reasoning_content


def test_too_long_a_prompt_has_an_error_of_its_own(url: str, provider: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(url, provider, "x " * 9000)


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_stream(url: str, provider: str) -> None:
    message, _ = streamed(url, provider, tools=[WEATHER])
    assert message.tool_calls[0].function.arguments == '{"city": "Paris"}'


@pytest.mark.usefixtures("busy")
def test_signs_of_life_disturb_no_stream_of_anthropics_api(url: str) -> None:
    address = url.removesuffix("/v1")
    message, usage = streamed(url, "anthropic", "What is 23 + 45?", api_base=address)
    assert message.content == "23 + 45 = 68"
    assert usage.completion_tokens > 5


@pytest.mark.parametrize("name", ["headrace-mini", "headrace-mini:latest"])
@pytest.mark.parametrize("kind", OF_OLLAMA)
def test_a_model_answers_by_ollamas_api(url: str, kind: str, name: str) -> None:
    address = url.removesuffix("/v1")
    question = [{"role": "user", "content": "Hello"}]
    model = {"model": f"{kind}/{name}", "api_base": address, "temperature": 0}
    answer = litellm.completion(messages=question, **model)
    assert answer.choices[0].message.content == "Hello! How can I help you?"
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 5
    parts = litellm.completion(messages=question, stream=True, **model)
    whole = litellm.stream_chunk_builder(list(parts))
    assert whole.choices[0].message.content == answer.choices[0].message.content


def test_a_tool_is_called_and_its_result_answered_by_ollamas_api(url: str) -> None:
    address = url.removesuffix("/v1")
    (choice,) = complete(url, "ollama_chat", tools=[WEATHER], api_base=address).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'}
    messages = [*QUESTION, choice.message.model_dump(), result]
    (choice,) = complete(url, "ollama_chat", messages, tools=[WEATHER], api_base=address).choices
    assert choice.message.content == "The weather in Paris is sunny."


def test_a_tool_is_called_in_a_stream_of_ollamas_api(url: str) -> None:
    address = url.removesuffix("/v1")
    message, _ = streamed(url, "ollama_chat", tools=[WEATHER], api_base=address)
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_inputs_become_vectors_by_ollamas_api(url: str) -> None:
    address = url.removesuffix("/v1")
    answer = litellm.embedding("ollama/headrace-mini", input=["one", "two"], api_base=address)
    first, second = (it["embedding"] for it in answer.data)
    assert len(first) == len(second) > 100 and first != second


@pytest.mark.usefixtures("grammars")
def test_an_answer_has_the_shape_that_was_asked_for(url: str, provider: str) -> None:
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    question = "Answer as JSON with the keys name and age: Anna is 34 years old."
    (choice,) = complete(url, provider, question, response_format=wanted).choices
    assert set(json.loads(choice.message.content)) == {"name", "age"}


@pytest.mark.usefixtures("grammars")
def test_a_forced_call_is_made(url: str, provider: str) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    (call,) = complete(url, provider, "Hello", **fields).choices[0].message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["city"]
