"""Tests that truncation drops old items but keeps calls and outputs together."""

import random
from typing import Any

import pytest

from headrace.protocols.openai.response_history import (
    cut_points,
    dropped,
    runs_of,
    summary_of,
    visible,
)


def call(id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id}


def output(id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id}


def said(role: str) -> dict[str, Any]:
    return {"type": "message", "role": role}


def test_truncation_never_separates_a_call_from_its_output() -> None:
    items = [said("user"), call("a"), call("b"), output("b"), output("a"), call("c"), output("c")]
    assert cut_points(items) == [0, 1, 5]


def test_an_id_can_stand_for_several_calls() -> None:
    items = [call("a"), output("a"), call("a"), output("a"), output("a"), said("user")]
    assert cut_points(items) == [0, 2, 5]


def test_calls_and_outputs_stay_together_in_any_order() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        items = [said(draw.choice(["user", "assistant", "system"])) for _ in range(6)]
        for id in "abc":
            first, last = sorted(draw.sample(range(len(items) + 1), 2))
            items.insert(last, output(id))
            items.insert(first, call(id))
        for cut in cut_points(items):
            gone = {items[place].get("call_id") for place in dropped(items, cut)}
            left = [it for i, it in enumerate(items) if i not in dropped(items, cut)]
            assert not (gone - {None}) & {it.get("call_id") for it in left}


def test_instructions_summaries_and_the_newest_question_stay() -> None:
    items = [said("developer"), said("user"), {"type": "compaction"}, said("user"), said("user")]
    assert dropped(items, len(items)) == [1, 3]


def test_ids_of_a_wrong_type_are_ignored() -> None:
    assert cut_points([{"type": "x_call", "call_id": [1]}, {"type": "x_output", "id": {}}]) == [
        0,
        1,
    ]


def test_runs_of_numbers_are_stored_as_first_and_last() -> None:
    assert runs_of([1, 2, 3, 6, 8, 9]) == [[1, 3], [6, 6], [8, 9]] and runs_of([]) == []


SUMMARY = {"type": "compaction", "encrypted_content": "Summary of it"}


@pytest.mark.parametrize(
    ("items", "order"),
    [
        ([said("user"), said("assistant")], [0, 1]),
        ([said("user"), said("assistant"), SUMMARY], [0, 2]),
        ([said("system"), said("user"), SUMMARY, said("assistant")], [0, 2, 1, 3]),
        ([said("user"), said("user"), SUMMARY], [0, 2, 1]),
        ([said("user"), SUMMARY, said("user")], [0, 1, 2]),
        ([said("user"), SUMMARY, call("a"), output("a"), SUMMARY], [0, 4]),
        ([said("user"), {"type": "compaction", "encrypted_content": "gAAAA"}], [0, 1]),
    ],
)
def test_a_summary_replaces_what_is_before_it(
    items: list[dict[str, Any]], order: list[int]
) -> None:
    assert visible(items) == order


def test_the_newest_messages_of_the_user_stay_before_a_summary() -> None:
    users = [said("user") | {"content": "x" * 3000} for _ in range(4)]
    assert visible([*users, said("assistant"), SUMMARY]) == [2, 3, 5]
    huge = said("user") | {"content": "x" * 9000}
    assert visible([*users, huge, said("assistant"), SUMMARY]) == [4, 6]


def test_the_summaries_of_other_servers_are_read() -> None:
    assert summary_of(SUMMARY) == "Summary of the conversation so far:\nSummary of it"
    assert summary_of({"type": "compaction", "summary": "Short"}).endswith("far:\nShort")
    for hidden in ("gAAAAABo", None, 7, {}):
        assert summary_of({"type": "compaction", "encrypted_content": hidden}) is None
