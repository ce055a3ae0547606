"""ChatOpenAI of langchain-openai."""

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = HumanMessage("What is the weather in Paris?")


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    return '{"weather": "sunny"}'


@pytest.fixture
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="headrace-mini",
        base_url=url,
        api_key="unused",
        temperature=0,
        max_retries=0,
        max_tokens=200,
        stream_usage=True,
    )


def joined(stream: Any) -> Any:
    first, *others = stream
    for chunk in others:
        first += chunk
    return first


def test_a_model_answers(model: ChatOpenAI) -> None:
    answer = model.invoke("Hello")
    assert answer.content == "Hello! How can I help you?"
    assert answer.usage_metadata["output_tokens"] > 5


def test_a_stream_has_text_and_usage(model: ChatOpenAI) -> None:
    answer = joined(model.stream("Count from 1 to 5."))
    assert answer.content == "1, 2, 3, 4, 5"
    assert answer.usage_metadata["output_tokens"] > 5


def test_a_tool_is_called_and_its_result_answered(model: ChatOpenAI) -> None:
    bound = model.bind_tools([get_weather])
    asked = bound.invoke([QUESTION])
    result = get_weather.invoke(asked.tool_calls[0])
    assert bound.invoke([QUESTION, asked, result]).content == "The weather in Paris is sunny."


def test_a_tool_is_called_in_a_stream(model: ChatOpenAI) -> None:
    bound = model.bind_tools([get_weather])
    asked = joined(bound.stream([QUESTION]))
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = get_weather.invoke(call)
    answer = joined(bound.stream([QUESTION, asked, result]))
    assert answer.content == "The weather in Paris is sunny."


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_stream(model: ChatOpenAI) -> None:
    (call,) = joined(model.bind_tools([get_weather]).stream([QUESTION])).tool_calls
    assert call["args"] == {"city": "Paris"}


@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_has_the_shape_that_was_asked_for(model: ChatOpenAI, method: str) -> None:
    question = "Answer as JSON with the keys name and age: Anna is 34 years old."
    shaped = model.with_structured_output(Person, method=method)
    assert isinstance(shaped.invoke(question), Person)


@pytest.mark.usefixtures("grammars")
def test_a_forced_call_is_made(model: ChatOpenAI) -> None:
    (call,) = model.bind_tools([get_weather], tool_choice="any").invoke("Hello").tool_calls
    assert list(call["args"]) == ["city"]
