"""Hides facts in a text and asks for them, in words or as JSON."""

import json
from dataclasses import dataclass
from random import Random

from mini.skills import code
from mini.talk import invented
from mini.turn import Turn
from mini.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    JOBS,
    NAMES,
    NATURE,
    OBJECTS,
    PLACES,
    THINGS,
    TIMES,
    VERBS,
)


@dataclass(frozen=True)
class Fact:
    # Equal for two facts that would contradict each other.
    about: str
    told: str
    asked: str
    answer: str


# Each line has the sentence that states a fact, and then the ways to ask for it.
FACTS = (
    ("{who}'s code is {code}.", "What is {who}'s code?|Tell me {who}'s code."),
    ("The code of the {what} is {code}.",
     "What is the code of the {what}?|Tell me the code of the {what}."),
    ("The secret code is {code}.", "What is the secret code?|Tell me the secret code."),
    ("The code is {code}.", "What is the code?|Tell me the code."),
    ("The {what} is {colour}.",
     "What colour is the {what}?|What color is the {what}?|Which colour has the {what}?"),
    ("The name of the {animal} is {who}.",
     "What is the name of the {animal}?|Tell me the name of the {animal}."),
    ("My name is {who}.", "What is my name?|Do you know my name?"),
    ("{who} lives in {city}.", "Where does {who} live?|In which city does {who} live?"),
    ("{who} is {age} years old.", "How old is {who}?|What is the age of {who}?"),
    ("{who}'s favourite colour is {colour}.",
     "What is {who}'s favourite colour?|Which colour does {who} like best?"),
    ("{who} works as a {job}.", "What does {who} work as?|What is the job of {who}?"),
)  # fmt: skip


def name(dice: Random) -> str:
    return dice.choice(NAMES) if dice.random() < 0.85 else invented(dice).capitalize()


def fact(dice: Random) -> Fact:
    """Return a fact; its answer repeats the sentence that states it."""
    told, asks = dice.choice(FACTS)
    words = {
        "who": name(dice),
        "what": dice.choice(OBJECTS),
        "animal": dice.choice(ANIMALS),
        "code": code(dice),
        "colour": dice.choice(COLOURS),
        "city": dice.choice(CITIES),
        "job": dice.choice(JOBS),
        "age": dice.randint(2, 99),
    }
    answer, ways = told.format(**words), asks.format(**words).split("|")
    return Fact(ways[0], answer, dice.choice(ways), answer.replace("My name", "Your name"))


def filler(dice: Random) -> str:
    """Return a sentence without a fact that is asked for."""
    thing = f"the {dice.choice(ADJECTIVES)} {dice.choice(NATURE)}"
    place, time = dice.choice(PLACES), dice.choice(TIMES)
    kind = dice.random()
    if kind < 0.5:
        text = f"{thing} {dice.choice(VERBS)} {place} {time}."
    elif kind < 0.7:
        text = f"{time} {thing} {dice.choice(VERBS)} {place}."
    elif kind < 0.9:
        text = f"{dice.choice(NAMES)} saw {thing} {place}."
    else:
        text = " ".join(dice.choices(THINGS + ADJECTIVES, k=dice.randint(4, 10))) + "."
    return text[0].upper() + text[1:]


def _distinct(dice: Random, wanted: int) -> list[Fact]:
    """Return at most `wanted` facts that answer different questions."""
    drawn = [fact(dice) for _ in range(wanted)]
    return list({one.about: one for one in drawn}.values())


def text_with(dice: Random, facts: list[Fact], room: int) -> str:
    """Return the facts in random order among fillers, in about `room` tokens."""
    num_fillers = max(0, room - 12 * len(facts)) // 11
    sentences = [filler(dice) for _ in range(num_fillers)]
    for one in facts:
        sentences.insert(dice.randint(0, len(sentences)), one.told)
    return " ".join(sentences)


def find(dice: Random, room: int, num_questions: int = 3) -> list[Turn]:
    """Return a text with facts and questions about it, each in its own turn."""
    length = dice.randint(0, room)
    facts = _distinct(dice, dice.randint(1, min(12, 2 + room // 30)))
    text = text_with(dice, facts, length)
    asked = dice.sample(facts, min(num_questions, len(facts)))
    thought = "I look for it in the text."
    turns = [Turn(f.asked, f.answer, thought, key=f"{text} {f.asked}") for f in asked]
    frames = ("{t}\n\n{q}", "{t}\n{q}", "{t} {q}", "{q}\n\n{t}", "Read this:\n{t}\n\n{q}",
              "Text: {t}\nQuestion: {q}", "Remember: {t} {q}")  # fmt: skip
    first = turns[0]
    if dice.random() < 0.15:
        return [Turn("Remember: " + text, dice.choice(("I will.",))), *turns]
    ask = dice.choice(frames).format(t=text, q=first.ask)
    return [Turn(ask, first.answer, first.thought), *turns[1:]]


def _person(dice: Random) -> dict[str, tuple[str, str | int]]:
    """Return a sentence and a value for each key."""
    who = name(dice)
    city, colour, job = dice.choice(CITIES), dice.choice(COLOURS), dice.choice(JOBS)
    age, secret = dice.randint(2, 99), code(dice)
    return {
        "name": (f"The name is {who}.", who),
        "city": (f"{who} lives in {city}.", city),
        "age": (f"{who} is {age} years old.", age),
        "colour": (f"{who}'s favourite colour is {colour}.", colour),
        "job": (f"{who} works as a {job}.", job),
        "code": (f"{who}'s code is {secret}.", secret),
    }


def shaped(dice: Random, room: int) -> Turn:
    """Return a request for a JSON object with some keys, in the order in which they are named."""
    person = _person(dice)
    keys = dice.sample(list(person), dice.randint(1, 5))
    # Another sentence already contains the name.
    named = len(keys) > 1 and dice.random() < 0.5
    told = [person[key][0] for key in keys if not (named and key == "name")]
    dice.shuffle(told)
    listed = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    s = "" if len(keys) == 1 else "s"
    ask = dice.choice(
        ("Answer as JSON with the key{s} {k}: {t}", "Give JSON with the key{s} {k}.\n{t}",
         "{t}\nAnswer as JSON with the key{s} {k}.", "Extract {k} as JSON: {t}",
         "{t} Write this as a JSON object with {k}.", "Return a JSON object with {k}: {t}",
         "Answer in the shape {e}.\n{t}", "{t}\nAnswer in the shape {e}")
    )  # fmt: skip
    shape = "{" + ", ".join(f'"{key}": ...' for key in keys) + "}"
    ask = ask.format(s=s, k=listed, t=" ".join(told), e=shape)
    answer = json.dumps({key: person[key][1] for key in keys})
    return Turn(ask, answer, f"The keys are {listed}.")
