"""Tests the names of models, which come from files and folders, and their lookup."""

from pathlib import Path

import pytest

from headrace.protocols.worker_model import WorkerModel
from headrace.text.model_names import (
    Aliases,
    Models,
    called,
    names_of,
    paths_of,
    root_of,
    settled_aliases,
    with_unique_names,
)
from headrace_common.config.settings import ModelConfig
from headrace_common.config.sources import check_names
from headrace_common.errors import ConfigError, RequestError


def gguf(*place: str | Path) -> str:
    file = Path(*place)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF")
    return str(file)


def names(*models: str, **given: str) -> list[tuple[str, ...]]:
    configs = [ModelConfig(model=model) for model in models]
    configs += [
        ModelConfig(model=model, served_model_name=(name,)) for name, model in given.items()
    ]
    return [config.served_model_name for config in with_unique_names(tuple(configs))]


def test_a_model_is_called_by_the_name_of_its_file_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some-model"
    file = gguf(folder, "small-Q4_1.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in (file, "some-model/small-Q4_1.gguf", "~/some-model/small-Q4_1.gguf"):
        assert names_of(ModelConfig(model=model)) == ("small-Q4_1",)
    assert root_of(ModelConfig(model=f"{folder}:Q4_1")) == "small-Q4_1"
    assert root_of(ModelConfig(model="./some-model/")) == "some-model"
    assert root_of(ModelConfig(model=gguf(tmp_path, "big-00002-of-00003.gguf"))) == "big"
    for model in ("Qwen/Qwen3-0.6B", "someone/files-GGUF:Q8_0", "headrace-mini"):
        assert root_of(ModelConfig(model=model)) == model and not paths_of(ModelConfig(model=model))
    assert root_of(ModelConfig(model="/no/such/place/model.gguf")) == "model"
    given = ModelConfig(model=file, served_model_name=("a", "b"))
    assert (names_of(given), root_of(given)) == (("a", "b"), "small-Q4_1")


def test_models_of_the_same_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    a, b = gguf(tmp_path, "a", "m.gguf"), gguf(tmp_path, "b", "m.gguf")
    deep = gguf(tmp_path, "b", "a", "m.gguf")
    other = gguf(tmp_path, "a", "n.gguf")
    assert names(a, other) == [("m",), ("n",)]
    assert names(a, b, other) == [("a/m",), ("b/m",), ("n",)]
    assert names(deep, a) == [("b/a/m",), (f"{tmp_path.name}/a/m",)]
    assert names(a, m=b) == [("a/m",), ("m",)]


def test_one_path_twice_needs_names_of_its_own(tmp_path: Path) -> None:
    config = ModelConfig(model=gguf(tmp_path, "m.gguf"))
    with pytest.raises(ConfigError, match="2 models are named 'm'; give each a name"):
        check_names(with_unique_names((config, config)))


def test_a_model_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf(tmp_path, "m.gguf")
    monkeypatch.chdir(tmp_path)
    config = ModelConfig(model="./m.gguf")

    def never() -> None:
        raise AssertionError("only its names are asked for")

    model = WorkerModel(names_of(config), never, never, paths_of(config))  # type: ignore[arg-type]
    models = Models((WorkerModel(("first",), never, never), model))  # type: ignore[arg-type]
    for name in ("m", "./m.gguf", "m.gguf", file):
        assert models.get(name) is model
        assert called(model, name) == called(model, None) == "m"
    with pytest.raises(RequestError) as unknown:
        models.get("/other/m.gguf")
    assert "This server has: first, m." in str(unknown.value)


def models_named(*names: str, aliases: tuple[str, ...]) -> Models[WorkerModel]:
    def never() -> None:
        raise AssertionError("only its names are asked for")

    texts = tuple(WorkerModel((name,), never, never) for name in names)  # type: ignore[arg-type]
    return Models(texts, Aliases(aliases))


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("small", "small"),  # a name takes precedence over every alias
        ("claude-small", "claude-small"),
        ("claude-haiku", "small"),  # a fixed alias takes precedence over a pattern
        ("claude-haiku:latest", "small"),
        ("claude-opus", "large"),  # the first pattern that fits
        ("claude-opus-4", "large"),
        ("claude-[a]?", "small"),
        ("claude-[a]x", "large"),
        ("small:latest", "small"),
        ("Claude-opus", "Claude-opus"),  # nobody's
        ("dangling", "dangling"),
    ],
)
def test_a_name_takes_precedence_over_an_alias_and_that_over_patterns(
    asked: str, meant: str
) -> None:
    aliases = ("*small=large", "claude-[a]?=small", "claude-*=large", "claude-opus*=small")
    fixed = ("claude-haiku=small", "small=large", "dangling=gone")
    models = models_named("small", "large", "claude-small", aliases=(*aliases, *fixed))
    assert models.resolve(asked) == meant
    found = models.answering(asked)
    assert (found.names[0] if found else asked) == meant
    assert models.aliases == {"claude-[a]?": "small", "claude-haiku": "small"}


def test_exact_lookup_ignores_aliases() -> None:
    models = models_named("small", aliases=("claude-*=small", "other=small"))
    assert models.find("claude-x") is None and models.find("other") is None
    with pytest.raises(RequestError):  # such as a model that was removed while a request waited
        models.exact("claude-x")


def test_one_suffix_may_follow_a_name_and_no_more() -> None:
    models = models_named("small", aliases=())
    for number in (2, 5000):
        assert models.find("small" + number * ":latest") is None


def test_a_pattern_with_many_stars_is_matched_quickly() -> None:
    aliases = Aliases(["*a" * 30 + "=small"])
    assert aliases.model("a" * 200_000 + "b") is None


def test_the_model_of_an_alias_may_be_given_as_it_was_to_the_server(tmp_path: Path) -> None:
    file = gguf(tmp_path, "m.gguf")
    configs = (
        ModelConfig(model=file, adapter=("sql=./a",)),
        ModelConfig(model="org/hub", served_model_name=("hub", "h")),
    )
    pairs = ("a=m", "b=sql", "c=h", "d=org/hub", f"e={file}", "a=m")
    assert settled_aliases(pairs, configs) == ("a=m", "b=sql", "c=h", "d=hub", "e=m")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            ("a=nosuch",),
            "--alias a=nosuch: no model or adapter is named 'nosuch'; served names: m, sql.",
        ),
        (("a=m", "a=sql"), "--alias a is given for 'm' and 'sql'; keep one of them."),
        (("a=m", "b=a"), "no model or adapter is named 'a'"),
    ],
)
def test_an_alias_of_an_unknown_model_is_refused_at_startup(
    pairs: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    config = ModelConfig(model=gguf(tmp_path, "m.gguf"), adapter=("sql=./a",))
    with pytest.raises(ConfigError) as refused:
        settled_aliases(pairs, (config,))
    assert message in str(refused.value)
