import json
from random import Random

import pytest
from tokenizers import Tokenizer

from headrace.text.template import ChatTemplate
from headrace_common.request import Chat
from mini import calls, recall, skills, talk
from mini.conversation import IGNORED, exchange, opening, row
from mini.export import TEMPLATE
from mini.turn import Turn
from mini.vocabulary import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(seed=1, vocab_size=400, num_conversations=20)


def drawn(skill, number: int = 200) -> list[Turn]:
    return [skill(Random(seed), 150) for seed in range(number)]


def test_sums_are_right():
    for turn in drawn(skills.add):
        left, right = turn.answer.split(" = ")
        a, sign, b = left.split()
        assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert turn.thought.endswith(f"= {right}")


def test_a_copied_text_is_part_of_the_question():
    assert all(turn.answer in turn.ask for turn in drawn(skills.copy))


def test_a_recalled_fact_is_part_of_the_question():
    for seed in range(100):
        first = recall.find(Random(seed), 300, 1)[-1]
        assert first.answer.replace("Your name", "My name") in first.ask or first.key


def test_json_answers_only_have_values_from_the_question():
    for turn in drawn(recall.shaped):
        assert all(str(value) in turn.ask for value in json.loads(turn.answer).values())


def test_a_tool_call_uses_an_offered_tool_and_its_parameters():
    for seed in range(50):
        dice = Random(seed)
        turn = calls.call(dice, calls.toolbox(dice, 3))
        offered = {tool["function"]["name"]: tool["function"] for tool in turn.tools}
        call = json.loads(turn.call)
        assert call["arguments"].keys() == offered[call["name"]]["parameters"]["properties"].keys()


def test_rows_are_full_and_reproducible_from_their_seed(tokenizer):
    ids, wanted = row(Random(5), tokenizer, 256)
    assert len(ids) == len(wanted) == 256
    assert row(Random(5), tokenizer, 256) == (ids, wanted)
    assert all(w in (IGNORED, after) for w, after in zip(wanted, ids[1:], strict=False))


def test_held_out_prompts_are_never_trained_on(tokenizer):
    held = [turn.key for turn in drawn(skills.add, 400) if turn.is_held_out]
    asked = " ".join(tokenizer.decode(row(Random(seed), tokenizer, 256)[0]) for seed in range(60))
    answers = [key.replace("+", " + ").replace("-", " - ") + " =" for key in held]
    assert held and not any(f"\n{answer}" in asked for answer in answers)


def test_each_digit_is_a_token_and_any_text_round_trips(tokenizer):
    text = '<think>\n1234 naïve 水 -- a  b\n\n</think> {"k": [1]}'
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(digit in tokenizer.encode(text).tokens for digit in "1234")


def as_messages(turn: Turn) -> tuple[dict[str, object], ...]:
    called = {"type": "function", "function": json.loads(turn.call)} if turn.call else None
    asked = {"role": "user", "content": turn.ask}
    if not called:
        return asked, {"role": "assistant", "content": turn.answer}
    call = {"role": "assistant", "content": None, "tool_calls": [called]}
    result = {"role": "tool", "content": turn.result}
    return asked, call, result, {"role": "assistant", "content": turn.answer}


def render(*messages, **fields) -> str:
    return ChatTemplate({"default": TEMPLATE.read_text()}, {}).render(Chat(messages, **fields))


def trained(*pieces: list[tuple[str, bool]]) -> str:
    return "".join(text for part in pieces for text, _ in part)


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_template_renders_the_text_used_in_training(system):
    first = [{"role": "system", "content": system}] if system else []
    for seed in range(20):
        dice = Random(seed)
        turns = [talk.talk(dice), skills.copy(dice, 40)]
        messages = [message for turn in turns for message in as_messages(turn)]
        expected = trained(opening(system), *(exchange(turn) for turn in turns))
        assert render(*first, *messages, add_generation_prompt=False) == expected


def test_the_template_renders_tools_calls_and_results_as_trained():
    dice = Random(3)
    turn = calls.call(dice, calls.toolbox(dice, 3))
    text = render(*as_messages(turn), tools=turn.tools, add_generation_prompt=False)
    assert text == trained(opening("", turn.tools), exchange(turn))


def test_thinking_is_switched_on_by_the_template():
    turn = skills.add(Random(1), 0)
    text = render(as_messages(turn)[0], template_kwargs={"enable_thinking": True})
    assert trained(exchange(turn, think=True)).startswith(text + "<think>\n")
    assert render(as_messages(turn)[0]) == text.replace(" /think", "")
