"""Tests of PUT /manage/desired, which adds, changes and removes models at runtime."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_models import FLAGS, LIMIT_S, ask, at_work
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server


@pytest.fixture(scope="module")
def flags(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    state = tmp_path_factory.mktemp("desired") / "state"
    return [*(f"--model={name}={folder}" for name in "ab"), "--state-dir", str(state), *FLAGS]


@pytest.fixture(scope="module")
def shared(flags: list[str]) -> Iterator[ServerProcess]:
    with running_server(*flags) as running:
        yield running


def desired(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/manage/desired", timeout=LIMIT_S).json()
    return found


def put(url: str, document: Any) -> httpx.Response:
    return httpx.put(f"{url}/manage/desired", json=document, timeout=LIMIT_S)


def models(url: str) -> dict[str, dict[str, Any]]:
    entries = httpx.get(f"{url}/models", timeout=LIMIT_S).json()["data"]
    return {entry["id"]: entry for entry in entries}


def with_settings(model: dict[str, Any], name: str, **settings: Any) -> dict[str, Any]:
    return {**model, "served_model_name": [name], **settings}


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ([], None),
        ({"model": []}, "model"),
        ({"models": []}, "models"),
        ({"models": [{}]}, "models[0].model"),
        ({"models": ["a"]}, "models[0]"),
        (
            {"models": [{"model": "x"}, {"model": "y", "max_model_lem": 1}]},
            "models[1].max_model_lem",
        ),
        ({"models": [{"model": "x", "max_model_len": "many"}]}, "models[0].max_model_len"),
        ({"models": [{"model": "x", "dtype": "int3"}]}, "models[0].dtype"),
        ({"models": [{"model": "x", "max_num_seqs": 0}]}, "models[0].max_num_seqs"),
        ({"models": [{"model": "x"}, {"model": "x"}]}, "models[0].served_model_name"),
    ],
)
def test_an_invalid_document_is_refused_with_the_fields_path_and_changes_nothing(
    shared: ServerProcess, document: Any, param: str | None
) -> None:
    before = desired(shared.url)
    refused = put(shared.url, document)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert desired(shared.url) == before


def test_a_removed_model_finishes_its_streams_first(shared: ServerProcess) -> None:
    url = shared.url
    a, b = desired(url)["models"]
    ask(url, "b")
    with contextlib.ExitStack() as undo:
        client = undo.enter_context(httpx.Client(timeout=LIMIT_S))
        with at_work(url, client):  # asserts that its stream has ended well
            assert put(url, {"models": [b]}).status_code == 200
            assert models(url)["a"]["pending"] == "removal"
            assert ask(url, "a").status_code == 404
            assert ask(url, "b").status_code == 200
    eventually(lambda: list(models(url)) == ["b"], LIMIT_S)
    assert put(url, {"models": [a, b]}).status_code == 200
    assert ask(url, "a").status_code == 200


def test_a_changed_model_finishes_its_streams_before_it_reloads(
    shared: ServerProcess,
) -> None:
    url = shared.url
    a, b = desired(url)["models"]
    with httpx.Client(timeout=LIMIT_S) as client:
        with at_work(url, client):
            changed = with_settings(a, "a", max_model_len=128)
            assert put(url, {"models": [changed, b]}).status_code == 200
            assert models(url)["a"]["pending"] == "reload"
        assert ask(url, "a").status_code == 200
        assert models(url)["a"]["max_model_len"] == 128 and "pending" not in models(url)["a"]


def test_models_are_changed_and_removed_and_persist_over_a_restart(
    shared: ServerProcess, flags: list[str]
) -> None:
    """Run last, since this test stops the shared server."""
    url = shared.url
    a, b = desired(url)["models"]
    assert (a["served_model_name"], b["max_model_len"]) == (["a"], 512)
    assert put(url, desired(url)).json() == {"models": [a, b]}
    assert ask(url, "a").status_code == 200
    smaller = with_settings(a, "a", max_model_len=256)
    document = {"models": [smaller, with_settings(b, "c")]}
    assert put(url, document).json() == document
    eventually(lambda: models(url)["a"]["max_model_len"] == 256, LIMIT_S)
    assert list(models(url)) == ["a", "c"]
    assert ask(url, "b").status_code == 404
    assert ask(url, "a").status_code == ask(url, "c").status_code == 200
    body = {"content": "hello", "model": "c"}  # the workers know it too
    assert httpx.post(f"{url}/tokenize", json=body, timeout=LIMIT_S).status_code == 200
    shared.stop()
    with running_server(*flags) as again:
        assert desired(again.url) == document
        assert ask(again.url, "c").status_code == 200
        assert ask(again.url, "b").status_code == 404
