"""What every test has: one compute thread, so that results do not move, and a tiny model."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# the same examples in every run; `make test ARGS=--hypothesis-profile=default` looks for new ones
settings.register_profile("suite", derandomize=True)
settings.load_profile("suite")
# make targets of their own run these, most of them in environments of their own
collect_ignore = ["clients", "cluster", "llama", "ops", "web"]


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run in an event loop of their own."""
    return "asyncio"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, for all who only read it."""
    from tools.harness.tiny_models import make_tiny_model  # it imports torch

    return make_tiny_model(tmp_path_factory.mktemp("shared") / "tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what all texts of headrace-mini rest on: that it says what the list says it does."""
    items.sort(key=lambda item: item.path.name != "test_mini_shipped.py")
