"""The agents of openai-agents, over chat completions and over responses."""

import asyncio
from collections.abc import Callable
from typing import Any

import agents
import openai
import pytest
from pydantic import BaseModel

Make = Callable[..., agents.Agent[Any]]


class Person(BaseModel):
    name: str
    age: int


cities: list[str] = []


@agents.function_tool
def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    cities.append(city)
    return '{"weather": "sunny"}'


MODELS = (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel)


@pytest.fixture(params=MODELS, ids=("chat", "responses"))
def make(url: str, request: pytest.FixtureRequest) -> Make:
    cities.clear()
    client = openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    model = request.param(model="headrace-mini", openai_client=client)

    def make(choice: str | None = None, **fields: Any) -> agents.Agent[Any]:
        settings = agents.ModelSettings(temperature=0, tool_choice=choice)
        own = {"name": "Clerk", "instructions": "Be brief.", "model": model}
        return agents.Agent(**own | {"model_settings": settings} | fields)

    return make


async def streamed(agent: agents.Agent[Any], question: str) -> tuple[list[str], str]:
    """The names of what happened, and the answer."""
    run = agents.Runner.run_streamed(agent, question)
    names = [event.name async for event in run.stream_events() if hasattr(event, "name")]
    return names, run.final_output


def test_an_agent_answers(make: Make) -> None:
    run = agents.Runner.run_sync(make(), "Hello")
    assert run.final_output == "Hello! How can I help you?"


def test_an_agent_uses_its_tool(make: Make) -> None:
    run = agents.Runner.run_sync(make(tools=[get_weather]), "What is the weather in Paris?")
    assert cities == ["Paris"]
    assert run.final_output == "The weather in Paris is sunny."


def test_an_agent_uses_its_tool_in_a_stream(make: Make) -> None:
    agent = make(tools=[get_weather])
    names, answer = asyncio.run(streamed(agent, "What is the weather in Rome?"))
    assert names == ["tool_called", "tool_output", "message_output_created"]
    assert (cities, answer) == (["Rome"], "The weather in Rome is sunny.")


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_agent(make: Make) -> None:
    agent = make(tools=[get_weather])
    _, answer = asyncio.run(streamed(agent, "What is the weather in Rome?"))
    assert (cities, answer) == (["Rome"], "The weather in Rome is sunny.")


@pytest.mark.usefixtures("grammars")
def test_an_agent_has_an_output_type(make: Make) -> None:
    question = "Answer as JSON with the keys name and age: Anna is 34 years old."
    run = agents.Runner.run_sync(make(output_type=Person), question)
    assert isinstance(run.final_output, Person)


@pytest.mark.usefixtures("grammars")
def test_an_agent_must_use_its_tool(make: Make) -> None:
    agent = make("required", tools=[get_weather], tool_use_behavior="stop_on_first_tool")
    run = agents.Runner.run_sync(agent, "Hello")
    assert len(cities) == 1
    assert run.final_output == '{"weather": "sunny"}'


@pytest.mark.usefixtures("grammars")
def test_an_agent_loops_over_three_forced_calls(make: Make) -> None:
    def until_third(context: Any, results: list[Any]) -> agents.ToolsToFinalOutputResult:
        return agents.ToolsToFinalOutputResult(len(cities) == 3, results[-1].output)

    agent = make(
        "get_weather",
        tools=[get_weather],
        tool_use_behavior=until_third,
        reset_tool_choice=False,
    )
    run = agents.Runner.run_sync(agent, "What is the weather in Paris?", max_turns=4)
    kinds = [type(item).__name__ for item in run.new_items if "Tool" in type(item).__name__]
    assert kinds == ["ToolCallItem", "ToolCallOutputItem"] * 3
    assert len(cities) == 3 and run.final_output == '{"weather": "sunny"}'
