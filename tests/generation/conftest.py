"""A model's folder, for its tokenizer and its limits."""

from pathlib import Path

import pytest

from tests.builders import make_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
