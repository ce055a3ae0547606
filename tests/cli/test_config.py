"""`headrace config`: the effective settings, and where each setting comes from."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli.main import cli

FILE = """
[serve]
port = 9000
max_num_seqs = 4
api_key = ["first-secret"]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("HEADRACE_PREFIX_CACHE_DIR")
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "6")
    monkeypatch.setenv("HEADRACE_STATE_DIR", "redis://:hunter@two@cache:6379/0")

    def run(*words: str) -> str:
        ended = CliRunner().invoke(cli, ["config", *words], catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    return run


def told(output: str) -> dict[tuple[str, str], tuple[Any, str]]:
    found = json.loads(output)
    return {(it["model"], it["name"]): (it["value"], it["origin"]) for it in found}


def test_each_setting_has_the_origin_that_takes_precedence(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(FILE)
    found = told(run("--config", str(file), "--max-model-len", "512", "--json"))
    assert found == {
        ("", "port"): (9000, str(file)),
        ("", "max_num_seqs"): (6, "HEADRACE_MAX_NUM_SEQS"),
        ("", "max_model_len"): (512, "--max-model-len"),
        ("", "api_key"): (["(hidden)"], str(file)),
        ("", "state_dir"): ("redis://***@cache:6379/0", "HEADRACE_STATE_DIR"),
    }
    assert told(run("--max-num-seqs", "8", "--json"))["", "max_num_seqs"] == (8, "--max-num-seqs")


@pytest.mark.parametrize("form", [(), ("--json",), ("--all",)])
def test_no_key_and_no_password_is_printed(
    form: tuple[str, ...], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(FILE)
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "second-secret")
    output = run("--config", str(file), *form)
    assert output.count("(hidden)") == 2
    assert "secret" not in output and "hunter" not in output and "two" not in output


def test_the_argument_and_an_alias_are_named_as_they_were_given(run: Any) -> None:
    found = told(run("smollm2", "--alias", "small", "--json"))
    assert found["", "model"] == ("smollm2", "MODEL")
    assert found["", "served_model_name"] == (["small"], "--alias")


def test_all_lists_the_defaults_too(run: Any) -> None:
    found = told(run("--all", "--json"))
    assert found["", "patience"] == (4.0, "default")
    assert len(found) > 60
    line = next(line for line in run("--all").splitlines() if line.startswith("patience"))
    assert line.split() == ["patience", "4.0", "default"]
    line = next(line for line in run("--all").splitlines() if line.startswith("api_key "))
    assert line.split() == ["api_key", "-", "default"]


def test_without_settings_a_sentence_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_MAX_NUM_SEQS")
    monkeypatch.delenv("HEADRACE_STATE_DIR")
    assert run() == "All settings have their defaults; --all lists them.\n"
    assert json.loads(run("--json")) == []


def test_each_of_several_models_has_its_own_settings(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[[models]]\nmodel = 'headrace-mini'\nserved_model_name = ['a']\nthreads = 1\n")
    found = told(run("--config", str(file), "--model", "b=headrace-mini", "--json"))
    assert found["a", "threads"] == (1, f"{file}, [[models]]")
    assert ("b", "threads") not in found
    assert found["b", "served_model_name"] == (["b"], "--model")
    assert found["b", "max_num_seqs"] == (6, "HEADRACE_MAX_NUM_SEQS")
