"""Tests the description and the prompts that the start page shows for a model."""

from types import SimpleNamespace
from typing import Any, cast

from headrace.fleet.served_model import ServedModel
from headrace.gateway.introductions import introduction


def of(root: str, num_parameters: int | None, task: str = "generate") -> dict[str, Any]:
    model = SimpleNamespace(root=root, num_parameters=num_parameters, tasks=(task,))
    return introduction(cast(ServedModel, model))


def test_the_built_in_model_has_a_description() -> None:
    assert "tiny built-in test model" in of("headrace-mini", None)["description"]


def test_a_small_model_gets_simple_prompts() -> None:
    assert "Hello! How are you?" in [
        it["prompt"] for it in of("smollm2", 134_515_008)["suggestions"]
    ]


def test_only_a_tiny_model_is_described_as_often_wrong() -> None:
    assert "often wrong" in of("smollm2", 134_515_008)["description"]
    assert "description" not in of("some/model", 600_000_000)


def test_an_embedding_model_has_no_prompts() -> None:
    told = of("some/embedding", 600_000_000, "embed")
    assert told["suggestions"] == [] and "cannot write answers" in told["description"]


def test_a_large_model_or_one_of_unknown_size_has_no_introduction() -> None:
    assert of("some/model", 7_000_000_000) == of("some/model", None) == {}
