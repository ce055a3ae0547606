"""Where settings come from, and what is said about those that are odd."""

import os
from pathlib import Path

import pytest

from headrace_common.config.settings import ServerConfig
from headrace_common.config.sources import load, read_keys
from headrace_common.errors import ConfigError


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


def test_keys_of_a_file_have_names_and_its_comments_are_none(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", "\ufeff# ours\n\n one \r\nann : two:three\n")
    assert read_keys(file) == {"one": "", "two:three": "ann"}
    # they may change, so the configuration has the file's path only
    assert keys_of(file, HEADRACE_API_KEYS="three") == ("three",)


@pytest.mark.parametrize("line", ["ann:", ":two", ":"])
def test_half_a_line_of_a_file_of_keys_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2 of .* is not name:key"):
        read_keys(written(tmp_path / "keys", f"one\n{line}\n"))


def test_a_bad_file_of_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    for name in ("api_key_file", "admin_key_file"):
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"{flag}: cannot read"):
            load({name: str(tmp_path / "nowhere")}, {}, None)


def test_a_tilde_is_the_home_folder_in_each_setting_of_a_path(tmp_path: Path) -> None:
    file = written(tmp_path / "own.toml", '[serve]\nstate_dir = "~/streams"\n')
    config = load({"ssl_certfile": "~/cert.pem"}, {}, file)
    assert config.streams.state_dir == os.path.expanduser("~/streams")
    assert config.http.ssl_certfile == os.path.expanduser("~/cert.pem")


def test_a_switch_is_true_or_false(tmp_path: Path) -> None:
    assert load({"vllm_metrics": True}, {}, None).http.vllm_metrics
    assert load({}, {"HEADRACE_VLLM_METRICS": "true"}, None).http.vllm_metrics
    with pytest.raises(ConfigError, match='HEADRACE_VLLM_METRICS is "maybe"; it must be true or'):
        load({}, {"HEADRACE_VLLM_METRICS": "maybe"}, None)


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


@pytest.mark.parametrize(
    "variable", ["HEADRACE_API_KEYS", "HEADRACE_API_KEY", "HEADRACE_ADMIN_KEY"]
)
@pytest.mark.parametrize("text", ["", ",", " , "])
def test_a_variable_for_keys_that_holds_none_opens_no_server(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} contains no key"):
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
        ("MAX_STALL_MS", "a number above 0, or off"),
        ("LINGER_S", "a number of at least 0"),
        ("MAX_NUM_SEQS", "a whole number of at least 1"),
        ("THREADS", "a whole number of at least 1, or auto"),
    ],
)
def test_ranges_and_choices_are_told_in_words(variable: str, must_be: str) -> None:
    told = refusal({}, **{f"HEADRACE_{variable}": "f8"})
    assert told == f'HEADRACE_{variable} is "f8"; it must be {must_be}.'


def test_a_limit_that_only_guards_integers_is_told_to_those_who_exceed_it() -> None:
    assert refusal({"threads": 1 << 41}).endswith("it must be at most 1099511627776.")
    assert refusal({"max_stall_ms": "1e12"}) == (
        '--max-stall-ms is "1e12"; it must be at most 1000000000.'
    )


def test_a_wrong_key_is_not_shown() -> None:
    assert "secret" not in refusal({"api_key": ("secret", "")})


def test_keys_outside_the_table_of_the_server_are_warned_of(tmp_path: Path) -> None:
    file = written(tmp_path / "it.toml", "port = 1\n[sevre]\nport = 2\n[serve]\nport = 3\n")
    said: list[str] = []
    assert load({}, {}, file, said.append).http.port == 3
    assert len(said) == 1 and "port, sevre" in said[0] and str(file) in said[0]


def test_a_server_that_is_no_table_is_refused(tmp_path: Path) -> None:
    assert "[serve]" in refusal({}, written(tmp_path / "it.toml", "serve = 5\n"))


def test_each_of_several_models_has_its_own_settings_and_those_of_all(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[serve]\nthreads = 2\nmax_models = 1\n[[models]]\nmodel = "./one"\nmax_num_seqs = 3\n'
        '[[models]]\nmodel = "./two"\nthreads = 1\nserved_model_name = ["second", "b"]\n'
    )
    config = load({"models_at": ("third=./three",)}, {}, file)
    assert [model.model for model in config.models] == ["./one", "./two", "./three"]
    assert [model.threads for model in config.models] == [2, 1, 2]
    assert [model.scheduler.max_num_seqs for model in config.models] == [3, None, None]
    assert config.models[1].served_model_name == ("second", "b")
    assert (config.models[2].served_model_name, config.loading.max_models) == (("third",), 1)
    assert load({"model": "first"}, {}, file).models[0].model == "first"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('model = "x"\nthread = 2', r"Unknown key 'thread' in \[\[models\]\] 1 .*threads"),
        ('model = "x"\nport = 2', r"Unknown key 'port' in \[\[models\]\] 1"),
        ("threads = 2", "has no model"),
        ('model = "x"\nthreads = 0', r"threads in \[\[models\]\] 1 of .* is 0; it must be"),
    ],
)
def test_a_fault_in_the_table_of_a_model_is_named(table: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[[models]]\n{table}\n")
    with pytest.raises(ConfigError, match=message):
        load({}, {}, file)


def test_adapters_are_named_beside_one_model() -> None:
    assert load({"adapter": ["sql=./a=b"]}, {}, None).models[0].adapter == ("sql=./a=b",)
    with pytest.raises(ConfigError, match="--adapter is for a single model"):
        load({"adapter": ["sql=./a"], "models_at": ["m=./m", "n=./n"]}, {}, None)
    with pytest.raises(ConfigError, match="2 models are named 'm'"):
        load({"adapter": ["m=./a"], "served_model_name": ["m"]}, {}, None)
    with pytest.raises(ConfigError, match=r"--adapter is .* such as sql=./sql-lora"):
        load({"adapter": ["./a"]}, {}, None)


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 models are named 'a'"):
        load({"models_at": ("a=x", "a=y")}, {}, None)
    with pytest.raises(ConfigError, match="NAME=PATH"):
        load({"models_at": ("a",)}, {}, None)


def test_more_engines_that_stay_than_there_may_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="--min-replicas is 3, but --replicas is only 2"):
        load({"replicas": 2, "min_replicas": 3}, {}, None)


def test_a_folder_of_models_offers_what_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").touch()
    (tmp_path / "two.gguf").touch()
    (tmp_path / "one.gguf").touch()  # it must not hide the folder
    (tmp_path / "notes").mkdir()
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "modules.json").touch()
    config = load({"models_dir": str(tmp_path), "threads": "2"}, {}, None)
    named = [model.served_model_name for model in config.models]
    assert named == [("one",), ("vectors",), ("one.gguf",), ("two",)]
    assert {model.threads for model in config.models} == {2}
    with pytest.raises(ConfigError, match=r"--models-dir: .*notes has no subfolder"):
        load({"models_dir": str(tmp_path / "notes")}, {}, None)
    with pytest.raises(ConfigError, match=r"--models-dir: .*nowhere is not a folder"):
        load({"models_dir": str(tmp_path / "nowhere")}, {}, None)


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        (
            ["https://a.example,https://b.example:8443"],
            ("https://a.example", "https://b.example:8443"),
        ),
        (["HTTPS://A.Example/", "http://b.example:80"], ("https://a.example", "http://b.example")),
        (
            ["tauri://localhost", "null", "http://[::1]:3000"],
            ("tauri://localhost", "null", "http://[::1]:3000"),
        ),
        (["*"], ("*",)),
    ],
)
def test_origins_are_listed_with_commas_or_apart_and_taken_as_browsers_send_them(
    given: list[str], origins: tuple[str, ...], tmp_path: Path
) -> None:
    assert load({"allowed_origins": given}, {}, None).http.allowed_origins == origins
    joined = {"HEADRACE_ALLOWED_ORIGINS": ",".join(given)}
    assert load({}, joined, None).http.allowed_origins == origins
    hosts = load({"allowed_host": ["a.example, b.example"]}, {}, None).http.allowed_host
    assert hosts == ("a.example", "b.example")


@pytest.mark.parametrize(
    "given",
    [
        "app.example",
        "https://a.example/app",
        "https://*.example",
        "https://u@a.example",
        "https://",
    ],
)
def test_an_origin_that_no_page_has_is_refused_at_the_start(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins: .* is not an origin"):
        load({"allowed_origins": ["https://b.example", given]}, {}, None)


def test_one_odd_entry_of_the_folder_of_models_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good/config.json").touch()
    root = os.fsencode(tmp_path)
    os.mkdir(root + b"/not \xff")
    open(root + b"/not \xff/config.json", "w").close()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/config.json")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("broken", "broken.gguf"):
        (tmp_path / name).symlink_to("/nowhere/at/all")
    (tmp_path / "itself").symlink_to("itself")
    warnings: list[str] = []
    config = load({"models_dir": str(tmp_path)}, {}, None, warnings.append)
    assert [model.served_model_name for model in config.models] == [("good",)]
    assert len(warnings) == 1 and "its name is not UTF-8" in warnings[0]


def test_aliases_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    file = written(tmp_path / "it.toml", '[serve]\nalias = ["f=m"]\n')
    variable = {"HEADRACE_ALIAS": "claude-*=m, v=m"}
    assert load({}, {}, file).alias == ("f=m",)
    assert load({}, variable, file).alias == ("claude-*=m", "v=m")
    assert load({"alias": ("a=m", "b=m")}, variable, file).alias == ("a=m", "b=m")


def test_an_alias_without_a_model_is_another_name_of_the_served_one(tmp_path: Path) -> None:
    config = load({"served_model_name": ("a",), "alias": ("b", "c=a")}, {}, None)
    assert (config.models[0].served_model_name, config.alias) == (("a", "b"), ("c=a",))
    file = written(tmp_path / "it.toml", '[serve]\nalias = ["f"]\n')
    assert load({}, {}, file).models[0].served_model_name == ("f",)
    assert load({"alias": ("b",)}, {}, file).models[0].served_model_name == ("b",)


def test_an_alias_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    wanted = "must be a list of strings such as claude-*=headrace-mini"
    for alias in ("=m", "a="):
        assert wanted in refusal({"alias": (alias,)})
    assert wanted in refusal({}, written(tmp_path / "it.toml", '[serve]\nalias = "a=m"\n'))
