"""The sentence and the prompts that the start page shows for a model."""

from types import SimpleNamespace
from typing import Any, cast

from headrace.fleet.served_model import ServedModel
from headrace.gateway.introductions import introduction


def of(root: str, num_parameters: int | None, task: str = "generate") -> dict[str, Any]:
    model = SimpleNamespace(root=root, num_parameters=num_parameters, tasks=(task,))
    return introduction(cast(ServedModel, model))


def test_the_built_in_model_is_described_whatever_name_it_is_served_by() -> None:
    assert "tiny built-in test model" in of("headrace-mini", None)["description"]


def test_small_models_have_prompts_of_their_own() -> None:
    assert "Hello! How are you?" in [
        it["prompt"] for it in of("smollm2", 134_515_008)["suggestions"]
    ]


def test_a_tiny_model_is_said_to_be_often_wrong_and_a_larger_one_is_not() -> None:
    assert "often wrong" in of("smollm2", 134_515_008)["description"]
    assert "description" not in of("some/model", 600_000_000)


def test_an_embedding_model_has_no_prompts() -> None:
    told = of("some/embedding", 600_000_000, "embed")
    assert told["suggestions"] == [] and "cannot write answers" in told["description"]


def test_nothing_is_said_of_large_models_or_of_those_of_unknown_size() -> None:
    assert of("some/model", 7_000_000_000) == of("some/model", None) == {}
