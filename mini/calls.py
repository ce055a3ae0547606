"""Generates tools with small schemas, calls of them, and answers from their results."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from mini.recall import name
from mini.skills import code
from mini.turn import Turn
from mini.words import CITIES, COLOURS, OBJECTS, WEATHERS


@dataclass(frozen=True)
class Topic:
    """The subject of a tool; {x} is the argument, and {r} is the value that it returns."""

    noun: str
    argument: str
    describes: str
    asks: str
    answers: str
    returned: str


TOPICS = (
    Topic("weather", "city|place|location", "Tells the weather in a city.",
          "What is the weather in {x}?|How is the weather in {x}?|Tell me the weather in {x}.",
          "The weather in {x} is {r}.", "weather"),
    Topic("time", "city|place|location", "Tells the time in a city.",
          "What time is it in {x}?|Tell me the time in {x}.", "The time in {x} is {r}.", "time"),
    Topic("temperature", "city|place|location", "Tells the temperature in a city.",
          "What is the temperature in {x}?|How warm is it in {x}?",
          "The temperature in {x} is {r}.", "temperature"),
    Topic("price", "item|thing|product", "Tells the price of an item.",
          "What is the price of the {x}?|How much is the {x}?|How much does the {x} cost?",
          "The price of the {x} is {r}.", "price"),
    Topic("colour", "item|thing|object", "Tells the colour of an item.",
          "What colour is the {x}?|Tell me the colour of the {x}.", "The {x} is {r}.", "colour"),
    Topic("phone", "name|person|who", "Finds the phone number of a person.",
          "What is the phone number of {x}?|Find the phone number of {x}.",
          "The phone number of {x} is {r}.", "phone"),
    Topic("code", "name|person|who", "Finds the code of a person.",
          "What is {x}'s code?|Find the code of {x}.|Look up the code of {x}.",
          "{x}'s code is {r}.", "code"),
    Topic("age", "name|person|who", "Tells the age of a person.",
          "How old is {x}?|What is the age of {x}?", "{x} is {r} years old.", "age"),
)  # fmt: skip
VERBS = ("get", "find", "look_up", "fetch", "read", "check")


def _value(dice: Random, returned: str) -> str | int:
    number = dice.randint(1, 99)
    return {
        "weather": dice.choice(WEATHERS),
        "time": f"{dice.randint(0, 23)}:{dice.randint(10, 59)}",
        "temperature": number,
        "price": number,
        "colour": dice.choice(COLOURS),
        "phone": str(dice.randint(1000, 999999)),
        "code": code(dice),
        "age": number,
    }[returned]


def _schema(name: str, argument: str, describes: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    function = {"name": name, "description": describes, "parameters": parameters}
    return {"type": "function", "function": function}


Tooled = tuple[Topic, dict[str, Any]]


def toolbox(dice: Random, most: int) -> list[Tooled]:
    """Return one to `most` tools with different subjects."""
    topics = dice.sample(TOPICS, dice.randint(1, most))
    box = []
    for topic in topics:
        called = dice.choice(VERBS) + "_" + topic.noun
        describes = topic.describes if dice.random() < 0.8 else f"The {topic.noun}."
        box.append((topic, _schema(called, dice.choice(topic.argument.split("|")), describes)))
    return box


def call(dice: Random, box: list[Tooled]) -> Turn:
    """Return a question that one of the tools answers, with the call, its result and the answer."""
    topic, schema = dice.choice(box)
    called = schema["function"]["name"]
    (argument,) = schema["function"]["parameters"]["properties"]
    if argument in ("city", "place", "location"):
        x = dice.choice(CITIES)
    else:
        x = dice.choice(OBJECTS) if topic.noun in ("price", "colour") else name(dice)
    value = _value(dice, topic.returned)
    ask = dice.choice(topic.asks.split("|")).format(x=x)
    if dice.random() < 0.2:
        ask = dice.choice((f"Use {called} for {x}.", f"Call {called} with {argument} {x}."))
    result = json.dumps({topic.returned: value})
    if dice.random() < 0.3:
        result = json.dumps({argument: x, topic.returned: value})
    elif dice.random() < 0.2:
        result = str(value)
    return Turn(
        ask,
        topic.answers.format(x=x, r=value),
        f"I call {called}.",
        tools=tuple(tool for _, tool in box),
        call=json.dumps({"name": called, "arguments": {argument: x}}),
        result=result,
    )
