"""Tests that calls of custom tools have their own form at any chunk boundaries."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.protocols.blocks import Block
from headrace.protocols.openai.custom_calls import CallDeltas, InputText, OpenCall
from headrace_common.pieces import TOOL, ChannelPiece

PLACE = ("chatcmpl-1", 0)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(st.text(), st.lists(st.integers(0, 1000), max_size=8), st.booleans())
@example('a "b" \\ \n \U0001f600', list(range(80)), True)
def test_the_input_text_does_not_depend_on_chunk_boundaries(
    text: str, places: list[int], is_ascii: bool
) -> None:
    found = InputText()
    whole = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert "".join(map(found.feed, cut(whole, places))) + found.end() == text == found.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ("{}", ""),
        ('{"other": 1}', '{"other": 1}'),
        ('{"x": 1, "input": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "cut o', "cut o"),
        ('{"input": "a\\ud800b"}', "a\ufffdb"),
        ("no JSON", "no JSON"),
    ],
)
def test_arguments_in_another_form_are_passed_on_unchanged(arguments: str, text: str) -> None:
    found = InputText()
    assert found.feed(arguments) + found.end() == text


PIECES = [
    ChannelPiece('{"q": 1}', TOOL, 0, "look"),
    ChannelPiece('{"input"', TOOL, 1, "sql"),
    ChannelPiece(': "sel', TOOL, 1),
    ChannelPiece('ect"}', TOOL, 1),
    ChannelPiece("nothing", TOOL, 2, "sql"),
]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_streamed_custom_calls_of_a_chat_equal_the_whole_answer(size: int) -> None:
    calls = CallDeltas(PLACE, ("sql",))
    deltas = [it for i in range(0, 5, size) for it in calls.add(PIECES[i : i + size])]
    deltas += calls.end()
    whole = CallDeltas(PLACE, ("sql",)).whole(PIECES)
    assert whole[0]["function"] == {"name": "look", "arguments": '{"q": 1}'}
    assert [it["custom"] for it in whole[1:]] == [
        {"name": "sql", "input": "select"},
        {"name": "sql", "input": "nothing"},
    ]
    for index, name in ((1, "select"), (2, "nothing")):
        own = [it for it in deltas if it["index"] == index]
        assert (own[0]["type"], own[0]["id"]) == ("custom", whole[index]["id"])
        assert "".join(it["custom"]["input"] for it in own) == name


@pytest.mark.parametrize("size", [1, 2, 7])
def test_calls_are_complete_for_any_number_and_order_of_pieces(size: int) -> None:
    pieces = [
        ChannelPiece('{"q"', TOOL, 0, "look"),
        ChannelPiece('{"input": "sel', TOOL, 1, "sql"),
        ChannelPiece(": 1", TOOL, 0),
        ChannelPiece("none", TOOL, 2, "sql"),
        ChannelPiece('ect"}', TOOL, 1),
        ChannelPiece("}", TOOL, 0),
        ChannelPiece("{}", TOOL, 3, "look"),
    ]
    calls = CallDeltas(PLACE, ("sql",))
    deltas = [it for i in range(0, 7, size) for it in calls.add(pieces[i : i + size])]
    texts = ["", "", "", ""]
    for delta in [*deltas, *calls.end()]:
        texts[delta["index"]] += delta.get("function", {}).get("arguments", "")
        texts[delta["index"]] += delta.get("custom", {}).get("input", "")
    assert texts == ['{"q": 1}', "select", "none", "{}"]
    whole = CallDeltas(PLACE, ("sql",)).whole(pieces)
    said = [it.get("custom", it.get("function")) for it in whole]
    assert [it.get("input", it.get("arguments")) for it in said] == texts
    assert [it["name"] for it in said] == ["look", "sql", "sql", "look"]
    assert len({it["id"] for it in whole}) == 4


def events_of(kind: str, arguments: str) -> list[dict[str, Any]]:
    call = OpenCall("resp_1", Block(0, TOOL, 0, kind), "", kind)
    return [*call.added(), *filter(None, [call.add(arguments, ())]), *call.done("completed")]


@pytest.mark.parametrize(
    ("kind", "arguments", "field", "value"),
    [
        (
            "apply_patch",
            '{"type": "create_file", "path": "a", "diff": "+x"}',
            "operation",
            {"type": "create_file", "path": "a", "diff": "+x"},
        ),
        (
            "apply_patch",
            '{"type": "delete_file", "path": "a"}',
            "operation",
            {"type": "delete_file", "path": "a"},
        ),
        (
            "local_shell",
            '{"command": ["ls"]}',
            "action",
            {
                "type": "exec",
                "command": ["ls"],
                "env": {},
                "timeout_ms": None,
                "user": None,
                "working_directory": None,
            },
        ),
        (
            "shell",
            '{"commands": ["ls"], "timeout_ms": 5}',
            "action",
            {"commands": ["ls"], "timeout_ms": 5, "max_output_length": None},
        ),
    ],
)
def test_a_fixed_tool_answers_with_an_item_of_its_type(
    kind: str, arguments: str, field: str, value: dict[str, Any]
) -> None:
    added, done = events_of(kind, arguments)
    assert (added["type"], done["type"]) == (
        "response.output_item.added",
        "response.output_item.done",
    )
    assert (done["item"]["type"], done["item"][field]) == (f"{kind}_call", value)
    assert added["item"]["id"] == done["item"]["id"]


def test_the_input_of_a_custom_call_is_streamed() -> None:
    events = events_of("custom", '{"input": "select"}')
    assert [it["type"].removeprefix("response.") for it in events] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (events[1]["delta"], events[2]["input"]) == ("select", "select")
    assert events[3]["item"]["input"] == "select"
