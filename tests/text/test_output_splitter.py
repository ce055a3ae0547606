import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.harmony import HarmonySplitter
from headrace.text.output_splitter import (
    REASONING_TAGS,
    Splitter,
    TagSplitter,
    make_splitting,
    reasoning_format,
)
from headrace.text.tool_formats.table import format_of
from headrace_common.pieces import CONTENT, ChannelPiece
from headrace_common.request import Channels

TAGS = ("<think>", "</think>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "</tool_call>"}]}}\n</tool_call>'
EXAMPLES: list[tuple[str, str, list[tuple[str, str, str]]]] = [
    ("hermes", "<think>\nhm\n</think>\n\nOk.\n" + CALL, [
        ("reasoning", "", "hm"), ("content", "", "Ok."),
        ("tool", "add", '{"a": [1, {"b": "</tool_call>"}]}')]),
    ("hermes", '<tool_call>{"arguments":{"x":1},"name":"y"}</tool_call>', [
        ("tool", "y", '{"x": 1}')]),
    ("hermes", "a <tool_call>no call</tool_call> " + CALL + "\nz", [
        ("content", "", "a <tool_call>no call</tool_call>"),
        ("tool", "add", '{"a": [1, {"b": "</tool_call>"}]}'), ("content", "", "z")]),
    ("hermes", '<tool_call>{"nam', [("content", "", '<tool_call>{"nam')]),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": 1', [("tool", "x", '{"a": 1')]),
    ("hermes", "a < b, 1 <tool", [("content", "", "a < b, 1 <tool")]),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {"q": 1}}, '
     '{"name": "b", "arguments": {}}]', [("tool", "a", '{"q": 1}'), ("tool", "b", "{}")]),
    ("mistral", 'hi[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]two[ARGS]{}', [
        ("content", "", "hi"), ("tool", "get", '{"a": 1}'), ("tool", "two", "{}")]),
    ("phi4", 'Ok.<|tool_call|>[{"name": "a", "arguments": {"q": 1}}, '
     '{"name": "b", "arguments": {}}]<|/tool_call|> z', [
        ("content", "", "Ok."), ("tool", "a", '{"q": 1}'), ("tool", "b", "{}"),
        ("content", "", "z")]),
    ("llama3", '{"name": "f", "parameters": {"x": "y"}}', [("tool", "f", '{"x": "y"}')]),
    ("llama3", '{"answer": 42} <|python_tag|>', [("content", "", '{"answer": 42} <|python_tag|>')]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [
        ("tool", "f", "{}"), ("tool", "g", "{}")]),
    ("generic", '{"name": "f", "arguments": {"x": "y"}}\n{"name": "g", "parameters": {}}\nDone.', [
        ("tool", "f", '{"x": "y"}'), ("tool", "g", "{}"), ("content", "", "Done.")]),
    ("generic", '```json\n{"name": "f", "arguments": {"x": "```"}}\n```\n', [
        ("tool", "f", '{"x": "```"}')]),
    ("generic", '```\n{"arguments": {"x": 1}, "name": "f"}\n``` Done', [
        ("tool", "f", '{"x": 1}'), ("content", "", "Done")]),
    ("generic", "```python\nx = {}\n```", [("content", "", "```python\nx = {}\n```")]),
    ("generic", '```json\n{"answer": 42}\n```', [("content", "", '```json\n{"answer": 42}\n```')]),
    ("generic", '{"answer": 42} ok', [("content", "", '{"answer": 42} ok')]),
    ("generic", '<think>\nhm\n</think>\n\n{"name": "f", "arguments": {}}', [
        ("reasoning", "", "hm"), ("tool", "f", "{}")]),
    ("generic", "`x` is it", [("content", "", "`x` is it")]),
    ("generic", "``", [("content", "", "``")]),
    ("generic", 'Ok: {"name": "f", "arguments": {}}', [
        ("content", "", 'Ok: {"name": "f", "arguments": {}}')]),
    ("pythonic", '[f(a=1, b="x"), g()]', [
        ("tool", "f", '{"a": 1, "b": "x"}'), ("tool", "g", "{}")]),
    ("pythonic", " [1, 2] x", [("content", "", " [1, 2] x")]),
    ("qwen3-coder", "Hm\n<tool_call>\n<function=run>\n<parameter=cmd>\n1\n2\n</parameter>\n"
     "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", [
        ("content", "", "Hm"), ("tool", "run", '{"cmd": "1\\n2", "n": 3}')]),
    ("glm", "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>", [
        ("tool", "get", '{"a": 5}')]),
    ("gemma4", 'Ok.<|tool_call>call:get{a:5,b:<|"|>x:{"y"}, z<|"|>,c:[1.5,{d:true,e:null}]}'
     "<tool_call|><|tool_call>call:two{}<tool_call|>", [
        ("content", "", "Ok."),
        ("tool", "get", '{"a": 5, "b": "x:{\\"y\\"}, z", "c": [1.5, {"d": true, "e": null}]}'),
        ("tool", "two", "{}")]),
    ("gemma4", '<|tool_call>call:f{"a": "b", c d: e f, g: None}', [
        ("tool", "f", '{"a": "b", "c d": "e f", "g": null}')]),
    ("gemma4", "<|tool_call>call:f{a:<|<tool_call|> x", [
        ("content", "", "<|tool_call>call:f{a:<|<tool_call|> x")]),
    ("olmo3", 'Ok.\n<function_calls>f(a="(", b=[1, {"c": true}])\ng()</function_calls> z', [
        ("content", "", "Ok."), ("tool", "f", '{"a": "(", "b": [1, {"c": true}]}'),
        ("tool", "g", "{}"), ("content", "", "z")]),
    ("deepseek", "x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n"
     '```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>two<｜tool▁sep｜>{}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [
        ("content", "", "x"), ("tool", "get", '{"a": 1}'), ("tool", "two", "{}")]),
]  # fmt: skip


def pieces_of(text: str, cuts: set[int]) -> list[str]:
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def joined(splitter: Splitter, parts: list[str]) -> list[tuple[str, str, str]]:
    pieces: list[ChannelPiece] = []
    for part in parts:
        pieces += splitter.feed(part)
    pieces += splitter.flush()
    assert splitter.num_held == 0
    found: list[list[str]] = []
    last: Any = None
    for piece in pieces:
        if (piece.channel, piece.call) == last and not piece.name:
            found[-1][2] += piece.text
        else:
            found.append([piece.channel, piece.name, piece.text])
        last = (piece.channel, piece.call)
    return [(channel, name, text) for channel, name, text in found]


def splitter_of(name: str, **more: Any) -> TagSplitter:
    types = {"cmd": ("string",), "note": ("null", "string"), "size": ("integer", "string")}
    return TagSplitter(TAGS, format_of(name), types=lambda _, key: types.get(key, ()), **more)


@pytest.mark.parametrize("name, text, expected", EXAMPLES)
@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 250)))
def test_channels_do_not_depend_on_chunk_boundaries(
    name: str, text: str, expected: list[tuple[str, str, str]], cuts: set[int]
) -> None:
    assert joined(splitter_of(name), pieces_of(text, cuts)) == expected


WORDS = [*TAGS, "<tool_call>", "</tool_call>", "<", "think>", "{", '"name"', ":", "a", " ", "\n"]


def bare(text: str) -> str:
    """Return the text without reasoning tags and white space."""
    for tag in TAGS:
        text = text.replace(tag, "")
    return "".join(text.split())


@settings(deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join), st.sets(st.integers(1, 90)))
def test_only_markers_and_adjacent_spaces_are_removed_from_an_answer(
    text: str, cuts: set[int]
) -> None:
    whole = joined(splitter_of("hermes"), [text])
    assert joined(splitter_of("hermes"), pieces_of(text, cuts)) == whole
    assert bare("".join(piece for _, _, piece in whole)) == bare(text)


def test_the_first_of_several_calls_is_sent_when_it_is_complete() -> None:
    splitter = splitter_of("olmo3")
    pieces = splitter.feed('<function_calls>f(a="x")\ng(b=')
    assert [(d.name, d.text) for d in pieces] == [("f", ""), ("", '{"a": "x"}')]


def test_the_text_of_a_marker_that_has_a_token_is_plain_text() -> None:
    splitter = splitter_of("hermes", tokens=[*TAGS, "<tool_call>", "</tool_call>"])
    pieces = splitter.feed("<think> is a word. ") + splitter.mark("<tool_call>")
    pieces += splitter.feed('{"name": "f", "arguments": {}}') + splitter.mark("</tool_call>")
    pieces += splitter.flush()
    assert "".join(d.text for d in pieces if d.channel == CONTENT) == "<think> is a word."
    assert [(d.name, d.text) for d in pieces if d.channel == "tool"] == [("f", ""), ("", "{}")]


def test_arguments_are_streamed() -> None:
    splitter = splitter_of("hermes")
    pieces = splitter.feed('<tool_call>{"name": "f", "arguments": {"text": "abc')
    assert [(d.name, d.text) for d in pieces] == [("f", ""), ("", '{"text": "abc')]
    assert [d.text for d in splitter.feed("def")] == ["def"]


def test_an_answer_may_begin_in_reasoning() -> None:
    splitter = splitter_of("hermes", starts_in="reasoning")
    assert joined(splitter, ["\nhm", " so\n</think>\n", "\nYes"]) == [
        ("reasoning", "", "hm so"),
        ("content", "", "Yes"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nthought out<channel|>Yes", [("reasoning", "thought out"), "Yes"]),
        ("<|channel>thought\n<channel|>Yes", ["Yes"]),
        ("<|channel>thoughtful<channel|>Yes", [("reasoning", "thoughtful"), "Yes"]),
        ("<|channel>though", [("reasoning", "though")]),
        ("<|channel>Hm<channel|>Yes", [("reasoning", "Hm"), "Yes"]),
        ("thought", ["thought"]),
    ],
)
@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 50)))
def test_the_label_of_a_channel_is_not_part_of_the_reasoning(
    text: str, expected: list[Any], cuts: set[int]
) -> None:
    tags = REASONING_TAGS["gemma4"]
    found = joined(TagSplitter(tags, None, label="thought"), pieces_of(text, cuts))
    assert found == [
        ("content", "", it) if isinstance(it, str) else (it[0], "", it[1]) for it in expected
    ]


@pytest.mark.parametrize(
    ("tail", "is_reasoning"),
    [
        ("<|turn>model\n", False),
        ("<|turn>model\n<|channel>thought\n", True),
        ("<|turn>model\n<|channel>thought\n<channel|>", False),
    ],
)
def test_a_prompt_of_gemma_4_may_open_and_close_the_reasoning(
    tail: str, is_reasoning: bool
) -> None:
    assert reasoning_format("{{ '<|channel>thought' }} {{ '<channel|>' }}") == "gemma4"
    splitting = make_splitting(Channels("", "gemma4", {}), tail, lambda marker: None)
    assert splitting.splitter is not None
    assert splitting.splitter.is_reasoning == is_reasoning


def test_a_template_that_only_opens_the_reasoning_is_recognized() -> None:
    assert reasoning_format("<|im_start|>assistant\n<think>") == "think"
    assert reasoning_format("<|im_start|>assistant\n") == ""


def test_plain_text_is_never_held_back() -> None:
    splitter = TagSplitter(None, None)
    assert [piece.text for piece in splitter.feed("a <")] == ["a <"]


def in_harmony(tail: str, *parts: str) -> list[tuple[str, str, str]]:
    splitter = HarmonySplitter(tail)
    pieces: list[ChannelPiece] = []
    for part in parts:
        pieces += splitter.mark(part) if part in HarmonySplitter.MARKERS else splitter.feed(part)
    return [(piece.channel, piece.name, piece.text) for piece in pieces + splitter.flush()]


def test_harmony_has_headers() -> None:
    assert in_harmony(
        "",
        "<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant",
        "<|channel|>", "commentary to=functions.get ", "<|constrain|>", "json", "<|message|>",
        '{"a":1}', "<|call|>",
    ) == [("reasoning", "", "hm"), ("tool", "get", ""), ("tool", "", '{"a":1}')]  # fmt: skip


def test_the_recipient_of_a_harmony_message_may_precede_the_channel() -> None:
    written = (
        " to=", "functions.get", "<|channel|>", "commentary", "<|constrain|>", "json",
        "<|message|>", "{}", "<|call|>",
    )  # fmt: skip
    assert in_harmony(OPENED, *written) == [("tool", "get", ""), ("tool", "", "{}")]


def test_words_of_a_harmony_header_stay_out_of_the_recipient() -> None:
    header = ("<|channel|>", "commentary to=functions.get", "<|constrain|>", "json", "<|message|>")
    assert in_harmony(OPENED, *header, "{}") == [("tool", "get", ""), ("tool", "", "{}")]


@pytest.mark.parametrize("text", ["Hello", " to you", " ", "to=a b"])
def test_text_without_a_harmony_header_is_the_answer(text: str) -> None:
    found = in_harmony(OPENED, *text, "!")
    assert {channel for channel, _, _ in found} == {"content"}
    assert "".join(piece for _, _, piece in found) == f"{text}!"


OPENED = "<|end|><|start|>assistant"


def test_arguments_are_json_whatever_the_format() -> None:
    for name, text, expected in EXAMPLES:
        for channel, _, arguments in expected:
            if channel == "tool" and not text.endswith("1"):
                assert isinstance(json.loads(arguments), dict), name
