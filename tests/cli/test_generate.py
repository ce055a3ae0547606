"""`headrace generate`: what goes to stdout, and where the prompt comes from."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.cli import exit_codes
from headrace.cli.generate import (
    _printed,
    check_fields,
    embed,
    generate,
    read_inputs,
    read_prompt,
    read_schema,
    split_inputs,
    split_words,
)
from headrace.cli.main import read_fields
from headrace.llm.llm import LLM
from headrace_common.answer import Piece
from headrace_common.config.settings import ServerConfig
from headrace_common.config.sources import load
from headrace_common.errors import ConfigError, RequestError
from tools.harness.servers import said
from tools.harness.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return load({"model": str(folder), "threads": 1, "max_model_len": 128}, {}, None)


@pytest.mark.parametrize(
    "word", ["Once upon", "-", "wheel", "and/or", "24/7", "...", "", "1/2 m", "long" * 2000]
)
def test_a_single_word_is_the_text_unless_it_names_a_model(word: str) -> None:
    assert split_words([word]) == (None, word)
    assert split_inputs([word]) == (None, [word])


def test_a_model_on_this_machine_may_stand_alone(tmp_path: Path) -> None:
    (tmp_path / "it.gguf").touch()
    for name in (
        "headrace-mini",
        "smollm2",
        "qwen3-0.6b",
        str(tmp_path),
        str(tmp_path / "it.gguf"),
    ):
        assert split_words([name]) == (name, None)
        assert split_inputs([name]) == (name, [])


def test_the_first_of_several_words_is_the_model() -> None:
    for name in ("Qwen/Qwen3-0.6B", "headrace-mini"):
        assert split_words([name, "a"]) == (name, "a")
        assert split_inputs([name, "a", "b"]) == (name, ["a", "b"])
    assert split_inputs(["A wheel", "a river"]) == (None, ["A wheel", "a river"])
    assert split_inputs(["-", "a"]) == (None, ["-", "a"])
    with pytest.raises(ConfigError, match="one prompt"):
        split_words(["A wheel", "a river"])


@pytest.mark.parametrize(
    "name",
    [
        "./modle",
        "../modle",
        "~/modle",
        "~nobody-here/modle",
        "/no/modle",
        "a/b/modle",
        "modle.gguf",
        "modle",
    ],
)
@pytest.mark.parametrize("split", [split_words, split_inputs])
def test_a_mistyped_model_is_not_taken_for_a_text(
    name: str, split: Callable[[list[str]], object]
) -> None:
    for rest in (["A wheel"], ["-"]):
        with pytest.raises(ConfigError, match=f"There is no model '{name}'"):
            split([name, *rest])
    if name.startswith((".", "~", "/")) or name.endswith(".gguf"):
        with pytest.raises(ConfigError, match="There is no model"):
            split([name])


def test_a_lone_word_that_could_be_a_hub_id_says_what_it_is_used_as(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert split_words(["no-one/no-such"]) == (None, "no-one/no-such")
    assert "'no-one/no-such' is used as the text" in capfd.readouterr().err
    split_words(["wheel"])
    assert not capfd.readouterr().err


@pytest.mark.parametrize("given", ["-", None])
def test_the_prompt_comes_from_stdin(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert read_prompt(given) == "two\nlines"


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(ConfigError, match="There is no prompt"):
        read_prompt(None)


def test_fields_are_json_or_text() -> None:
    pairs = ["temperature=0.5", "stop=END", "stop_token_ids=[1, 2]", "model=a=b"]
    known = ("temperature", "stop", "stop_token_ids", "model")
    assert read_fields(pairs, known) == {
        "temperature": 0.5,
        "stop": "END",
        "stop_token_ids": [1, 2],
        "model": "a=b",
    }


def test_stdout_has_the_text_and_nothing_else(
    config: ServerConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = {"temperature": 0, "max_tokens": 12}
    with LLM(config) as llm:
        expected = llm.generate("hi", **fields).text
    capfd.readouterr()
    generate(config, "hi", fields, as_json=False)
    assert capfd.readouterr().out == expected + "\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_models_words_do_not_move_a_terminals_cursor(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    words = Piece(0, "one\x1b[2J\ttwo\x9b\n", [1], "stop")
    llm = SimpleNamespace(stream=lambda **_: [words])
    list(_printed(cast(LLM, llm), "hi", {}, False))
    shown = "one\ufffd[2J\ttwo\ufffd\n\n" if is_terminal else "one\x1b[2J\ttwo\x9b\n\n"
    assert screen.getvalue() == shown


def test_json_is_the_whole_answer(config: ServerConfig, capsys: pytest.CaptureFixture[str]) -> None:
    generate(config, "hi", {"n": 2, "max_tokens": 3, "seed": 1}, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == 6


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "minLength": 20}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


def test_what_follows_a_schema_goes_on_to_its_end(
    config: ServerConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = check_fields({"json_schema": POINT, "temperature": 0}, "A point: ")
    code = generate(config, "A point: ", fields, as_json=False)
    shown = capsys.readouterr()
    assert (code == exit_codes.DONE) == ("was cut" not in shown.err and "reached" not in shown.err)
    if code == exit_codes.DONE:
        assert len(json.loads(shown.out)["name"]) >= 20
    else:  # of a model with random weights a string may have no end
        assert "the end of the context of 128 tokens" in shown.err


def test_a_text_that_was_cut_says_so_and_by_what(
    config: ServerConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = check_fields({"max_tokens": 3, "ignore_eos": True}, "hi")
    assert generate(config, "hi", fields, as_json=False) == exit_codes.DONE
    lines = said(capsys.readouterr().err)
    assert lines == [
        "headrace: The text was cut off after 3 tokens; allow more with -o max_tokens=N."
    ]
    assert (
        generate(config, "hi", fields | {"json_schema": POINT}, as_json=True) == exit_codes.FAILED
    )
    assert "was cut off after 3 tokens" in capsys.readouterr().err


def test_a_wrong_field_is_found_before_a_model_is_loaded() -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        check_fields({"max_tokens": "abc"}, "hi")
    with pytest.raises(RequestError, match="dimensions"):
        embed(load({"model": "/nowhere"}, {}, None), ["a"], {"dimensions": "abc"})


def test_a_schema_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "point.json"
    file.write_text('{"type": "integer"}')
    assert read_schema(str(file)) == {"type": "integer"}
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="not contain a JSON object"):
        read_schema(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schema(str(tmp_path / "none.json"))


def test_each_text_is_embedded_on_a_line_of_its_own(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    texts = read_inputs(["a", "-"])
    assert texts == ["a", "two", "lines"]
    embed(config, texts, {})
    lines = capsys.readouterr().out.splitlines()
    assert [len(json.loads(line)) for line in lines] == [64, 64, 64]
