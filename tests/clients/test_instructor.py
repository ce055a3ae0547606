"""instructor, which makes objects out of tool calls."""

from collections.abc import Callable
from typing import Any

import instructor
import openai
import pytest
from instructor import Mode
from pydantic import BaseModel

Ask = Callable[..., Any]
PERSON = "Answer as JSON with the keys name and age: Anna is 34 years old."


class get_weather(BaseModel):
    """Tells the weather in a city."""

    city: str


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def ask(url: str) -> Ask:
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)

    def ask(mode: Mode, wanted: type[BaseModel], question: str, verb: str = "create") -> Any:
        return getattr(instructor.from_openai(client, mode=mode), verb)(
            model="headrace-mini",
            response_model=wanted,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=200,
            max_retries=0,
        )

    return ask


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT])
def test_an_object_is_made_of_a_call(ask: Ask, mode: Mode) -> None:
    made = ask(mode, get_weather, "What is the weather in Paris?")
    assert isinstance(made, get_weather)
    assert made.city == "Paris"


def test_an_object_grows_in_a_stream(ask: Ask) -> None:
    *grown, last = ask(Mode.TOOLS, get_weather, "What is the weather in Rome?", "create_partial")
    assert last.city == "Rome"
    assert grown


@pytest.mark.usefixtures("busy")
def test_heartbeats_disturb_no_object(ask: Ask) -> None:
    *_, last = ask(Mode.TOOLS, get_weather, "What is the weather in Rome?", "create_partial")
    assert last.city == "Rome"


@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])
def test_an_object_is_made_of_what_the_model_was_not_trained_on(ask: Ask, mode: Mode) -> None:
    assert isinstance(ask(mode, Person, PERSON), Person)
