"""The openai package, which most others are built on."""

import json
import time
from typing import Any

import openai
import pytest
from pydantic import BaseModel

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
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
ANSWER = "The weather in Paris is sunny."
ONE_CALL = ("get_weather", '{"city": "Paris"}')


class Person(BaseModel):
    name: str
    age: int


PERSON = [
    {
        "role": "user",
        "content": "Answer as JSON with the keys name and age: Anna is 34 years old.",
    }
]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="unused", max_retries=0)


def chat(client: openai.OpenAI, text: str = "", **fields: Any) -> Any:
    asked = [{"role": "user", "content": text}]
    fields = {"model": "headrace-mini", "messages": asked, "temperature": 0} | fields
    return client.chat.completions.create(**fields)


def test_models_are_listed_with_the_length_of_their_context(client: openai.OpenAI) -> None:
    (model,) = [it for it in client.models.list() if it.id == "headrace-mini"]
    assert client.models.retrieve(model.id) == model
    extra: Any = model.model_extra
    assert extra["context_length"] == extra["context_window"] == extra["max_model_len"] > 0


def read(stream: Any) -> tuple[str, list[dict[str, str]], list[str]]:
    """Text, calls and finish reasons, put together as programs put them together."""
    text, calls, ends = "", [], []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
            for part in choice.delta.tool_calls or ():
                if part.index == len(calls):
                    calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
                calls[part.index]["arguments"] += part.function.arguments or ""
    return text, calls, ends


def test_a_chat_answers(client: openai.OpenAI) -> None:
    (choice,) = chat(client, "Hello").choices
    assert choice.message.content == "Hello! How can I help you?"
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


def test_a_stream_answers(client: openai.OpenAI) -> None:
    text, calls, ends = read(chat(client, "Count from 1 to 5.", stream=True))
    assert (text, calls, ends) == ("1, 2, 3, 4, 5", [], ["stop"])


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    (choice,) = chat(client, messages=QUESTION, tools=[WEATHER]).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == ONE_CALL
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'}
    (choice,) = chat(client, messages=[*QUESTION, choice.message, result], tools=[WEATHER]).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)


def test_a_tool_is_called_in_a_stream(client: openai.OpenAI) -> None:
    text, (call,), ends = read(chat(client, messages=QUESTION, tools=[WEATHER], stream=True))
    assert (text, ends) == ("", ["tool_calls"])
    assert (call["name"], call["arguments"]) == ONE_CALL
    assert call["id"].startswith("call_")


def test_the_packages_own_reading_of_a_stream_knows_the_call(client: openai.OpenAI) -> None:
    asked = {"model": "headrace-mini", "temperature": 0, "messages": QUESTION}
    with client.chat.completions.stream(**asked, tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert (call.function.name, call.function.arguments) == ONE_CALL


def test_two_choices_call_twice_with_ids_of_their_own(client: openai.OpenAI) -> None:
    choices = chat(client, messages=QUESTION, tools=[WEATHER], n=2).choices
    assert [choice.index for choice in choices] == [0, 1]
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 2


def test_no_tool_is_called_if_none_may_be(client: openai.OpenAI) -> None:
    (choice,) = chat(client, messages=QUESTION, tools=[WEATHER], tool_choice="none").choices
    assert choice.message.tool_calls is None


def test_logprobs_belong_to_the_tokens(client: openai.OpenAI) -> None:
    (choice,) = chat(client, "Hello", logprobs=True, top_logprobs=2).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith(choice.message.content)
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_reasoning_is_apart_from_the_answer(client: openai.OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = chat(client, "What is 23 + 45?", extra_body=thinking)
    message = answer.choices[0].message
    assert message.content == "23 + 45 = 68"
    assert message.reasoning_content == message.reasoning
    assert "63" in message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 5


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"text": "x " * 9000}, openai.BadRequestError, "context_length_exceeded"),
        ({"text": "Hello", "temperature": -1}, openai.BadRequestError, "invalid_value"),
        ({"text": "Hello", "model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"text": "Hello", "tool_choice": "required"}, openai.BadRequestError, "invalid_value"),
    ],
)
def test_errors_have_their_class_and_code(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(error) as caught:
        chat(client, **fields)
    assert caught.value.code == code
    assert caught.value.message


def is_forgotten(client: openai.OpenAI, stream_id: str) -> bool:
    try:
        client.get(f"/streams/{stream_id}", cast_to=dict[str, Any])
    except openai.NotFoundError:
        return True
    return False


def test_who_leaves_a_stream_ends_its_work(client: openai.OpenAI) -> None:
    fields = {"ignore_eos": True}
    with chat(client, "Count from 1 to 600.", stream=True, extra_body=fields) as stream:
        chunk = next(chunk for chunk in stream if chunk.choices[0].delta.content)
    late = time.monotonic() + 4  # thousands of tokens take longer
    while not is_forgotten(client, chunk.id):
        assert time.monotonic() < late


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_stream(client: openai.OpenAI) -> None:
    chunks = list(chat(client, messages=QUESTION, tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert sum(not delta.model_dump(exclude_none=True) for delta in deltas) >= 2
    _, (call,), _ = read(chunks)
    assert (call["name"], call["arguments"]) == ONE_CALL


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_whole_answer(client: openai.OpenAI) -> None:
    fields = {"messages": QUESTION, "tools": [WEATHER], "extra_body": {"heartbeat": True}}
    (call,) = chat(client, **fields).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ONE_CALL


@pytest.mark.usefixtures("grammars")
def test_an_answer_has_the_shape_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="headrace-mini", messages=PERSON, response_format=Person, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.usefixtures("grammars")
def test_an_answer_is_json_if_that_was_asked_for(client: openai.OpenAI) -> None:
    (choice,) = chat(client, messages=PERSON, response_format={"type": "json_object"}).choices
    assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_is_made(client: openai.OpenAI, choice: Any) -> None:
    fields = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200}
    (call,) = chat(client, "Hello", **fields).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
