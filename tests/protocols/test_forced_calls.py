"""Tests the grammars of tool formats, which must match exactly the format's calls."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from headrace.fleet.served_model import ServedModel
from headrace.protocols.worker import Jobs
from headrace.text.output_splitter import TagSplitter
from headrace.text.parameter_types import parameter_types
from headrace.text.tool_formats.table import format_of
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.grammar import Grammar, GrammarCompiler
from headrace_common.request import Route
from tests.text.test_output_splitter import joined

CHAT: Route = "/v1/chat/completions"
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "zone": {"type": ["string", "null"]},
        "wind": {"anyOf": [{"enum": ["m/s"]}, {"type": "null"}]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "places": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["city"],
}
ANY: dict[str, Any] = {"type": "object"}
NAMES = ("phi4", "gemma4", "olmo3", "pythonic")


class Speaker(NamedTuple):
    """A model whose chat template has a tool format."""

    jobs: Jobs
    compiler: GrammarCompiler
    model: ServedModel

    def grammar(self, choice: Any = "required", **fields: Any) -> Grammar:
        tools = [tool("f", PLACE, **fields), tool("now", ANY, **fields)]
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        checked = self.jobs.read(json.dumps(body | {"tool_choice": choice}).encode(), CHAT)
        return self.compiler.compile(checked.fields["constraint"][0])

    def takes(self, grammar: Grammar, text: str) -> bool:
        matcher = grammar._matcher.deep_copy()
        tokens = list(self.model.tokenizer.encode(text, add_special_tokens=False))
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


@pytest.fixture(scope="module")
def speaker_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns headrace-mini with a tool format, with or without tokens for the format's markers."""

    @cache
    def made(name: str, has_tokens: bool) -> Speaker:
        mini = ServedModel(ModelConfig()).folder
        folder = Path(shutil.copytree(mini, tmp_path_factory.mktemp(name) / "mini"))
        if has_tokens:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.add_special_tokens([*format_of(name).starts, *format_of(name).ends])
            tokenizer.save(str(folder / "tokenizer.json"))
        model = ServedModel(ModelConfig(model=str(folder), tool_format=name))  # type: ignore[arg-type]
        ends = model.spec.end_token_ids
        return Speaker(Jobs(model), GrammarCompiler.load(folder, 1600, ends), model)

    return made


RIGHT = {
    "phi4": [
        '<|tool_call|>[{"name": "f", "arguments": {"city": "a \\"b\\"", "days": 3}}]',
        '<|tool_call|>[{"name": "f", "arguments": {"city": ""}}, {"name": "now", "arguments": {}}]',
    ],
    "gemma4": [
        '<|tool_call>call:f{city:<|"|>a "b", {c}\n<|"|>,unit:<|"|>C<|"|>,days:3}<tool_call|>',
        '<|tool_call>call:f{city:<|"|><|"|>,zone:<|"|>12<|"|>,wind:null}<tool_call|>',
        '<|tool_call>call:f{city:<|"|><|"|>,zone:null,wind:<|"|>m/s<|"|>}<tool_call|>',
        '<|tool_call>call:f{city:<|"|><|"|>,places:["a", "c"]}<tool_call|>'
        '<|tool_call>call:now{"a": 1}<tool_call|>',
    ],
    "olmo3": [
        '<function_calls>f(city="a \\"b\\"", unit="C", days=3)</function_calls>',
        '<function_calls>f(city="", zone="12", wind=null)</function_calls>',
        '<function_calls>f(city="", places=["a", "c"])\nnow(**{"a": 1})</function_calls>',
    ],
    "pythonic": [
        '<|tool_call_start|>[f(city="a \\"b\\"", unit="C", days=3)]<|tool_call_end|>',
        '<|tool_call_start|>[f(city="", zone="12", wind=null)]<|tool_call_end|>',
        '<|tool_call_start|>[f(city="", places=["a"]), now(**{"a": 1})]<|tool_call_end|>',
    ],
}
WRONG = {
    "phi4": [
        "text",
        '<|tool_call|>{"name": "f", "arguments": {"city": ""}}',
        '<|tool_call|>[{"name": "f", "arguments": {"city": "", "days": 15}}]',
        '<|tool_call|>[{"name": "f", "arguments": {"city": "", "x": 1}}]',
        '<|tool_call|>[{"name": "g", "arguments": {}}]',
    ],
    "gemma4": [
        "text",
        '<|tool_call>call:f{unit:<|"|>C<|"|>}<tool_call|>',
        '<|tool_call>call:f{city:<|"|>a<|"|>,unit:<|"|>K<|"|>}<tool_call|>',
        '<|tool_call>call:f{city:<|"|>a<|"|>,days:15}<tool_call|>',
        '<|tool_call>call:f{city:<|"|>a<|"|>,zone:12}<tool_call|>',
        '<|tool_call>call:f{city:<|"|>a<|"|>,x:1}<tool_call|>',
        '<|tool_call>call:f{city:<|"|>a<|"|>',
        "<|tool_call>call:g{}<tool_call|>",
    ],
    "olmo3": [
        "text",
        '<function_calls>f(unit="C")</function_calls>',
        '<function_calls>f(city="a", unit="K")</function_calls>',
        '<function_calls>f(city="a", days=15)</function_calls>',
        '<function_calls>f(city="a", zone=12)</function_calls>',
        '<function_calls>f(city="a", x=1)</function_calls>',
        '<function_calls>f(city="a")',
        "<function_calls>g()</function_calls>",
    ],
    "pythonic": [
        "text",
        '<|tool_call_start|>[f(unit="C")]<|tool_call_end|>',
        '<|tool_call_start|>[f(city="a", unit="K")]<|tool_call_end|>',
        '<|tool_call_start|>[f(city="a", zone=12)]<|tool_call_end|>',
        '[f(city="a", days=15)]',
        '<|tool_call_start|>[f(city="a", x=1)]<|tool_call_end|>',
        '<|tool_call_start|>[f(city="a")',
        "<|tool_call_start|>[g()]<|tool_call_end|>",
    ],
}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_has_the_notation_and_the_arguments_of_its_tool(
    speaker_of: Any, name: str, has_tokens: bool
) -> None:
    speaker = speaker_of(name, has_tokens)
    grammar = speaker.grammar()
    # Granite 3 has no token for the end of a call, and writes no end.
    end = "<|/tool_call|>" if name == "phi4" and has_tokens else ""
    for text in RIGHT[name]:
        whole = text + end if has_tokens else without_tokens(name, text)
        assert speaker.takes(grammar, whole), whole
        found = joined(splitter_of(name), [whole])
        assert [(channel, called) for channel, called, _ in found][:1] == [("tool", "f")]
        Draft202012Validator(PLACE).validate(json.loads(found[0][2]))
    for text in WRONG[name]:
        whole = text + end if has_tokens else without_tokens(name, text)
        assert not speaker.takes(grammar, whole), whole


def without_tokens(name: str, text: str) -> str:
    """Return the text as written by models that have no tokens for the markers."""
    if name == "gemma4":
        # Without a token for the quote, strings are JSON.
        return text.replace("\n", " ").replace('"b"', "b").replace('<|"|>', '"')
    if name == "pythonic":
        return text.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    return text


def splitter_of(name: str) -> TagSplitter:
    types = parameter_types(PLACE)
    return TagSplitter(None, format_of(name), types=lambda _, key: types.get(key, ()))


@pytest.mark.parametrize("name", NAMES)
def test_a_named_tool_is_the_only_one_and_a_strict_tool_leaves_the_answer_free(
    speaker_of: Any, name: str
) -> None:
    speaker = speaker_of(name, True)
    end = "<|/tool_call|>" if name == "phi4" else ""
    first, *_, both = (text + end for text in RIGHT[name])
    named = speaker.grammar({"type": "function", "function": {"name": "f"}})
    assert speaker.takes(named, first) and not speaker.takes(named, both)
    strict = speaker.grammar("auto", strict=True)
    for text in ("", "Some text.", first, f"Some text. {first}"):
        assert speaker.takes(strict, text), text
    for text in WRONG[name][1:]:
        assert not speaker.takes(strict, text + end), text
    if name != "pythonic":
        with pytest.raises(RequestError, match=f"tool format is {name}"):
            speaker_of(name, False).grammar("auto", strict=True)


def test_strict_calls_in_brackets_need_no_tokens(speaker_of: Any) -> None:
    speaker = speaker_of("pythonic", False)
    strict = speaker.grammar("auto", strict=True)
    for text in ("", "Some text.", without_tokens("pythonic", RIGHT["pythonic"][0])):
        assert speaker.takes(strict, text), text
    for text in WRONG["pythonic"][1:]:
        assert not speaker.takes(strict, without_tokens("pythonic", text)), text


@pytest.mark.parametrize("name", NAMES)
def test_every_text_of_a_grammar_is_a_call_with_valid_arguments(speaker_of: Any, name: str) -> None:
    speaker = speaker_of(name, True)
    grammar, num_ended = speaker.grammar(), 0
    for seed in range(12):
        text = walk(speaker, grammar, random.Random(seed))
        if text is None:
            continue
        num_ended += 1
        found = joined(splitter_of(name), [text])
        assert found and {channel for channel, _, _ in found} == {"tool"}, text
        for _, called, arguments in found:
            schema = {"f": PLACE, "now": ANY}[called]
            Draft202012Validator(schema).validate(json.loads(arguments))
    assert num_ended >= 4


def walk(speaker: Speaker, grammar: Grammar, dice: random.Random) -> str | None:
    """Return a random answer of the grammar; None if it does not end soon.

    Short tokens are likely, so that strings and numbers end.
    """
    matcher, tokens = grammar._matcher.deep_copy(), list[int]()
    tokenizer = speaker.model.tokenizer
    while not matcher.is_stopped() and len(tokens) < 300:
        bits = np.unpackbits(
            np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        allowed = np.flatnonzero(bits)
        allowed = allowed[~np.isin(allowed, speaker.model.spec.end_token_ids)]
        if matcher.is_accepting() and (not len(allowed) or dice.random() < 0.5):
            break
        some = [int(it) for it in dice.choices(allowed.tolist(), k=20)] + allowed[-2:].tolist()
        closing = [it for it in some if tokenizer.token_text(it)[:1] in '"<}])']
        token = dice.choice(closing or some)
        matcher.consume_token(token)
        tokens.append(token)
    return tokenizer.decode(tokens, False) if matcher.is_accepting() else None
