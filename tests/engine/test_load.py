from pathlib import Path

import pytest

from headrace.config.settings import ModelConfig
from headrace.engine.load import load
from tools.harness.tiny_models import make_tiny_model


@pytest.mark.parametrize("lane", ["native-text", "generic-text"])
def test_an_engine_knows_what_steps_cost_from_its_start(lane: str, tmp_path: Path) -> None:
    config = ModelConfig(model=str(make_tiny_model(tmp_path)), device="cpu", threads=1, lane=lane)
    for _ in range(3):  # real times: a neighbour may slow down one step of a few milliseconds
        model = load(config)[1]._budget.model
        assert model.is_measured and model.largest_measured == 64
        if model.coefficients.cost(0, 64) > model.coefficients.cost(0, 1) > 0:
            return
    pytest.fail("64 tokens never cost more than one")


def test_a_model_of_few_positions_is_timed_as_far_as_it_goes(tmp_path: Path) -> None:
    config = ModelConfig(model=str(make_tiny_model(tmp_path)), device="cpu", max_model_len=20)
    assert load(config)[1]._budget.model.largest_measured == 16
