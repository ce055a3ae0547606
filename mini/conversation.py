"""Makes conversations from turns, and rows of token ids from conversations.

Everything is rendered as by the chat template. Held-out turns are never used.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from tokenizers import Tokenizer

from mini import calls, recall, skills, talk
from mini.turn import Turn
from mini.words import SYSTEMS

IGNORED = -100
# A text, and whether it is learnt.
Piece = tuple[str, bool]
Skill = Callable[[Random, int], Turn]

SKILLS: tuple[tuple[float, Skill], ...] = (
    (0.26, skills.count),
    # These are mostly too long for a row and are cut, so they train the first steps of long counts.
    (0.05, lambda dice, room: skills.count(dice, 1500)),
    (0.10, skills.listing),
    (0.06, skills.alphabet),
    (0.20, skills.copy),
    (0.06, skills.reverse),
    (0.05, skills.spell),
    (0.16, skills.add),
    (0.08, recall.shaped),
    (0.08, lambda dice, room: talk.talk(dice)),
    (0.04, lambda dice, room: talk.unknown(dice)),
)
ORDERS = {"Count", "List", "Name", "Give", "Say", "Recite", "Write", "Repeat", "Copy", "Reverse"}
ORDERS |= {"Spell", "Add", "Subtract", "Calculate"}
WEIGHTS = [weight for weight, _ in SKILLS]
# Shares of the turns that find facts, call a tool (where there are tools), or think.
FIND, CALL, THINK = 0.12, 0.6, 0.08
# So many turns that do not fit into a row are skipped; the next one is cut instead.
MOST_MISSES = 2


def system_text(system: str, tools: tuple[dict[str, object], ...]) -> str:
    if not tools:
        return system
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these tools:\n<tools>\n{listed}\n</tools>\nA call looks like this:\n"
        '<tool_call>\n{"name": "tool", "arguments": {"key": "value"}}\n</tool_call>'
    )
    return f"{system}\n\n{text}" if system else text


def opening(system: str, tools: tuple[dict[str, object], ...] = ()) -> list[Piece]:
    text = system_text(system, tools)
    return [(f"<|im_start|>system\n{text}<|im_end|>\n", False)] if text else []


def exchange(turn: Turn, think: bool = False) -> list[Piece]:
    """Return one turn as the template renders it."""
    switch = " /think" if think else ""
    thought = f"<think>\n{turn.thought}\n</think>\n\n" if think else ""
    asked = f"<|im_start|>user\n{turn.ask}{switch}<|im_end|>\n<|im_start|>assistant\n"
    pieces: list[Piece] = [(asked, False)]
    if turn.call:
        pieces += [
            (f"{thought}<tool_call>\n{turn.call}\n</tool_call><|im_end|>", True),
            (f"\n<|im_start|>user\n<tool_response>\n{turn.result}\n</tool_response><|im_end|>\n"
             "<|im_start|>assistant\n", False),
        ]  # fmt: skip
        thought = ""
    return [*pieces, (f"{thought}{turn.answer}<|im_end|>", True), ("\n", False)]


def _varied(dice: Random, turn: Turn) -> Turn:
    """Return the turn with its order varied: with a "please", or without a capital letter."""
    first, kind = turn.ask.split(maxsplit=1)[0], dice.random()
    if first not in ORDERS or kind > 0.35:
        return turn
    start = dice.choice(("Please ", "Please ", "please ", "Can you ", "Now ", "Could you please "))
    lower = turn.ask[0].lower() + turn.ask[1:]
    return replace(turn, ask=lower if kind < 0.1 else start + lower)


def _turns(dice: Random, box: list[calls.Tooled], room: int) -> list[Turn]:
    kind = dice.random()
    if box and kind < CALL:
        return [calls.call(dice, box)]
    if not box and kind < FIND:
        return recall.find(dice, room, num_questions=dice.randint(1, 1 + room // 60))
    (skill,) = dice.choices([skill for _, skill in SKILLS], WEIGHTS)
    turn = skill(dice, room)
    return [] if box and turn.answer == talk.UNKNOWN else [_varied(dice, turn)]


def conversation(dice: Random, length: int) -> Iterator[list[Piece]]:
    """Yield endless turns of one conversation, of which about `length` tokens will be used."""
    system = dice.choice(SYSTEMS) if dice.random() < 0.25 else ""
    has_tools = length > 128 and dice.random() < 0.3
    box = calls.toolbox(dice, 1 if length < 400 else 3) if has_tools else []
    yield opening(system, tuple(tool for _, tool in box))
    while True:
        for turn in _turns(dice, box, length * 3 // 4):
            if not turn.is_held_out:
                yield exchange(turn, think=bool(turn.thought) and dice.random() < THINK)


def row(dice: Random, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Return the first `length` token ids of a conversation, and its targets, shifted by one."""
    ids: list[int] = []
    wanted: list[int] = []
    misses = 0
    for pieces in conversation(dice, length):
        if len(ids) > length:
            break
        new = [(tokenizer.encode(text).ids, learnt) for text, learnt in pieces]
        if len(ids) + sum(len(part) for part, _ in new) > length + 1 and misses < MOST_MISSES:
            misses += 1
            continue
        for part, learnt in new:
            ids += part
            wanted += part if learnt else [IGNORED] * len(part)
    return ids[:length], wanted[1 : length + 1]
