"""Where settings come from, and what is said about those that are odd."""

from pathlib import Path

import pytest

from headrace.core.config import ServerConfig
from headrace.core.config_sources import load, read_keys
from headrace.core.errors import ConfigError


def keys_of(path: Path | None = None, **environment: str) -> tuple[str, ...]:
    flags = {} if path is None else {"api_key_file": str(path)}
    return load(flags, environment, None).http.api_key


def written(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def test_an_unknown_variable_is_passed_over_with_a_word_and_the_nearest() -> None:
    said: list[str] = []
    environment = {"HEADRACE_BIN": "/x", "HEADRACE_MAX_NUM_SEQ": "4", "HOME": "/y"}
    assert load({}, environment, None, said.append) == ServerConfig()
    assert said == [
        "Unknown variable HEADRACE_BIN. It is ignored.",
        "Unknown variable HEADRACE_MAX_NUM_SEQ; did you mean HEADRACE_MAX_NUM_SEQS? It is ignored.",
    ]


def test_a_misspelt_variable_for_keys_does_not_leave_the_server_open() -> None:
    with pytest.raises(ConfigError, match="did you mean HEADRACE_API_KEYS"):
        keys_of(HEADRACE_APIKEYS="secret")


def test_the_variable_of_clients_is_a_key_of_the_server_too() -> None:
    assert keys_of(HEADRACE_API_KEY="a") == ("a",)
    assert keys_of(HEADRACE_API_KEY="a", HEADRACE_API_KEYS="b,c") == ("b", "c")


def test_no_key_is_empty_since_everybody_has_that_one() -> None:
    assert keys_of(HEADRACE_API_KEYS=" a,, b,") == ("a", "b")
    with pytest.raises(ConfigError, match=r"--api-key must be .* none of them empty"):
        load({"api_key": ("",)}, {}, None)


def test_keys_of_a_file_are_added_and_its_comments_are_none(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", "\ufeff# ours\n\n one \r\ntwo\n")
    assert keys_of(file) == ("one", "two")
    assert keys_of(file, HEADRACE_API_KEYS="three") == ("three", "one", "two")


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 1), (0o604, 1)])
def test_a_file_of_keys_that_others_can_read_is_warned_of(
    mode: int, warnings: int, tmp_path: Path
) -> None:
    said: list[str] = []
    read_keys(written(tmp_path / "keys", "one", mode), said.append)
    assert len(said) == warnings and all("chmod 600" in line for line in said)


def test_a_file_without_keys_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for file in (written(tmp_path / "empty", "# none\n"), tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=f"{file}.*one"):
            read_keys(file)


@pytest.mark.parametrize("variable", ["HEADRACE_API_KEYS", "HEADRACE_API_KEY"])
@pytest.mark.parametrize("text", ["", ",", " , "])
def test_a_variable_for_keys_that_holds_none_opens_no_server(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} holds no key"):
        load({}, {variable: text}, None)


def refusal(
    flags: dict[str, object],
    file: Path | None = None,
    are_options: bool = False,
    **environment: str,
) -> str:
    with pytest.raises(ConfigError) as refused:
        load(flags, environment, file, are_options=are_options)
    return str(refused.value)


def test_a_wrong_value_is_named_as_it_was_given_with_what_it_must_be(tmp_path: Path) -> None:
    port = "it must be a whole number from 0 to 65535."
    file = written(tmp_path / "it.toml", "[serve]\nport = 70000\n")
    assert refusal({"port": "many"}) == f'--port is "many"; {port}'
    assert refusal({"port": -1}, are_options=True) == f"port is -1; {port}"
    assert refusal({}, HEADRACE_PORT="x") == f'HEADRACE_PORT is "x"; {port}'
    assert refusal({}, file) == f"port in {file} is 70000; {port}"


@pytest.mark.parametrize(
    ("variable", "must_be"),
    [
        ("DTYPE", "one of auto, float32, bfloat16"),
        ("MAX_STALL_MS", "a number above 0 and at most 1000000000 or off"),
        ("LINGER_S", "a number at least 0"),
        ("MAX_NUM_SEQS", "a whole number from 1 to 1099511627776"),
    ],
)
def test_ranges_and_choices_are_told_in_words(variable: str, must_be: str) -> None:
    told = refusal({}, **{f"HEADRACE_{variable}": "f8"})
    assert told == f'HEADRACE_{variable} is "f8"; it must be {must_be}.'


def test_a_wrong_key_is_not_shown() -> None:
    assert "secret" not in refusal({"api_key": ("secret", "")})


def test_keys_outside_the_table_of_the_server_are_warned_of(tmp_path: Path) -> None:
    file = written(tmp_path / "it.toml", "port = 1\n[sevre]\nport = 2\n[serve]\nport = 3\n")
    said: list[str] = []
    assert load({}, {}, file, said.append).http.port == 3
    assert len(said) == 1 and "port, sevre" in said[0] and str(file) in said[0]


def test_a_server_that_is_no_table_is_refused(tmp_path: Path) -> None:
    assert "[serve]" in refusal({}, written(tmp_path / "it.toml", "serve = 5\n"))
