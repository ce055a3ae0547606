"""The tool-calling agent of smolagents."""

from typing import Any

import pytest
from smolagents import OpenAIModel, PromptTemplates, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
cities: list[str] = []


@tool
def get_weather(city: str) -> str:
    """Tells the weather in a city.

    Args:
        city: the city
    """
    cities.append(city)
    return "sunny"


@pytest.fixture
def model(url: str) -> OpenAIModel:
    cities.clear()
    return OpenAIModel(
        model_id="headrace-mini", api_base=url, api_key="unused", temperature=0, max_tokens=200
    )


def arguments(message: Any) -> Any:
    (call,) = message.tool_calls
    return call.function.arguments


def streamed(model: OpenAIModel) -> str:
    deltas = list(model.generate_stream(QUESTION, tools_to_call_from=[get_weather]))
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    return "".join(call.function.arguments or "" for call in calls)


def test_a_model_answers(model: OpenAIModel) -> None:
    answer = model.generate([{"role": "user", "content": "Hello"}])
    assert answer.content == "Hello! How can I help you?"


def test_a_model_calls_a_tool(model: OpenAIModel) -> None:
    message = model.generate(QUESTION, tools_to_call_from=[get_weather])
    assert arguments(message) == '{"city": "Paris"}'
    assert streamed(model) == '{"city": "Paris"}'


def test_an_agent_uses_its_tool_and_ends_with_an_answer(model: OpenAIModel) -> None:
    # the package's own prompt takes half of the model's context
    bare = PromptTemplates(**EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Be brief."})
    agent = ToolCallingAgent([get_weather], model, bare, max_steps=1, verbosity_level=0)
    assert isinstance(agent.run("What is the weather in Paris?"), str)
    assert cities == ["Paris"]


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_stream(model: OpenAIModel) -> None:
    assert streamed(model) == '{"city": "Paris"}'


@pytest.mark.usefixtures("grammars")
def test_a_forced_call_is_made(model: OpenAIModel) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    message = model.generate(hello, tools_to_call_from=[get_weather], tool_choice="required")
    assert "city" in arguments(message)
