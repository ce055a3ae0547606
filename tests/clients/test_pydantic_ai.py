"""The agents of pydantic-ai."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PERSON = "Answer as JSON with the keys name and age: Anna is 34 years old."
cities: list[str] = []


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> dict[str, str]:
    """Tells the weather in a city."""
    cities.append(city)
    return {"weather": "sunny"}


@pytest.fixture
def model(url: str) -> OpenAIChatModel:
    cities.clear()
    return OpenAIChatModel("headrace-mini", provider=OpenAIProvider(base_url=url, api_key="unused"))


def agent(model: OpenAIChatModel, **fields: Any) -> Agent[None, Any]:
    settings = {"temperature": 0.0, "max_tokens": 200}
    return Agent(model, instructions="Be brief.", model_settings=settings, **fields)


async def streamed(agent: Agent[None, Any], question: str) -> list[str]:
    async with agent.run_stream(question) as run:
        # by default it joins what comes within a tenth of a second
        return [text async for text in run.stream_text(delta=True, debounce_by=None)]


def test_an_agent_answers(model: OpenAIChatModel) -> None:
    run = agent(model).run_sync("Hello")
    assert run.output == "Hello! How can I help you?"
    assert run.usage.output_tokens > 5


def test_an_agent_uses_its_tool(model: OpenAIChatModel) -> None:
    run = agent(model, tools=[get_weather]).run_sync("What is the weather in Paris?")
    assert (cities, run.output) == (["Paris"], "The weather in Paris is sunny.")


def test_an_agent_uses_its_tool_in_a_stream(model: OpenAIChatModel) -> None:
    clerk = agent(model, tools=[get_weather])
    parts = asyncio.run(streamed(clerk, "What is the weather in Rome?"))
    assert (cities, "".join(parts)) == (["Rome"], "The weather in Rome is sunny.")
    assert len(parts) > 1


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_agent(model: OpenAIChatModel) -> None:
    clerk = agent(model, tools=[get_weather])
    parts = asyncio.run(streamed(clerk, "What is the weather in Rome?"))
    assert (cities, "".join(parts)) == (["Rome"], "The weather in Rome is sunny.")


@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize("wanted", [ToolOutput(Person), NativeOutput(Person)])
def test_an_agent_has_an_output_type(model: OpenAIChatModel, wanted: Any) -> None:
    assert isinstance(agent(model, output_type=wanted).run_sync(PERSON).output, Person)
