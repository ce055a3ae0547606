"""The held-out questions of headrace-mini by skill; none of them was used in training."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from mini import calls, recall, skills, talk
from mini.conversation import Piece, exchange, opening
from mini.turn import Turn

Draw = Callable[[Random], list[Turn]]
ALL_SKILLS = (
    skills.count,
    skills.listing,
    skills.copy,
    skills.reverse,
    skills.spell,
    skills.add,
    recall.shaped,
)


@dataclass(frozen=True)
class Subject:
    """A row of the report; of the turns that `draw` returns, only the last one is marked."""

    name: str
    draw: Draw
    # The allowed range of the number of tokens.
    tokens: tuple[int, int] = (0, 4096)
    # The range applies to prompt and answer together, not to the answer alone.
    counts_prompt: bool = False
    think: bool = False


def one(skill: Callable[[Random, int], Turn], room: int = 150) -> Draw:
    return lambda dice: [skill(dice, room)]


def _sum(sign: str) -> Draw:
    def draw(dice: Random) -> list[Turn]:
        turn = skills.add(dice, 0)
        return [turn] if f" {sign} " in turn.answer else draw(dice)

    return draw


def _find(room: int) -> Draw:
    return lambda dice: recall.find(dice, room, 1)


def _call(num_tools: int) -> Draw:
    return lambda dice: [calls.call(dice, calls.toolbox(dice, num_tools))]


def _several(dice: Random) -> list[Turn]:
    return [dice.choice(ALL_SKILLS)(dice, 60) for _ in range(4)]


def _thinkable(dice: Random) -> list[Turn]:
    return [dice.choice((skills.count, skills.copy, recall.shaped))(dice, 80)]


SUBJECTS = (
    Subject("small talk", lambda dice: [talk.talk(dice)]),
    Subject("saying that it does not know", lambda dice: [talk.unknown(dice)]),
    Subject("counting, up to 150 tokens", one(skills.count), (2, 150)),
    Subject("counting, about 512 tokens", one(skills.count, 900), (462, 562)),
    Subject("counting, about 1,000 tokens", one(skills.count, 1300), (900, 1100)),
    Subject("listing", one(skills.listing)),
    Subject("alphabet", one(skills.alphabet, 60)),
    Subject("alphabet, many times", one(skills.alphabet, 800), (200, 700)),
    Subject("copying, up to 64 tokens", one(skills.copy), (2, 64)),
    Subject("copying, about 256 tokens", one(skills.copy, 700), (206, 306)),
    Subject("copying, about 512 tokens", one(skills.copy, 1500), (462, 562)),
    Subject("reversing", one(skills.reverse, 80)),
    Subject("spelling", one(skills.spell)),
    Subject("sums", _sum("+")),
    Subject("differences", _sum("-")),
    Subject("sums and differences with thinking", one(skills.add), think=True),
    Subject("fact-finding, up to 128 tokens", _find(110), (0, 128), True),
    Subject("fact-finding, about 512 tokens", _find(700), (462, 562), True),
    Subject("fact-finding, about 1,500 tokens", _find(2000), (1400, 1600), True),
    Subject("JSON of a given shape", one(recall.shaped)),
    Subject("tool call and answer, one tool", _call(1)),
    Subject("tool call and answer, up to three tools", _call(3)),
    Subject("other skills with thinking", _thinkable, think=True),
    Subject("fourth turn of a conversation", _several),
)


def paper(subject: Subject, dice: Random) -> list[Piece]:
    """Return a conversation whose last turn is held out and is the only one to be marked."""
    while True:
        turns = subject.draw(dice)
        if turns[-1].is_held_out:
            break
    system = "" if dice.random() < 0.7 else "You are a helpful assistant."
    pieces = opening(system, turns[-1].tools)
    for turn in turns[:-1]:
        pieces += [(text, False) for text, _ in exchange(turn)]
    return pieces + exchange(turns[-1], think=subject.think)
