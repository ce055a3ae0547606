"""One compute thread for every test: results do not move, and tests may run side by side."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# the same examples in every run; `make test ARGS=--hypothesis-profile=default` looks for new ones
settings.register_profile("suite", derandomize=True)
settings.load_profile("suite")
collect_ignore = ["clients"]  # `make test-clients` runs them, in environments of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what all texts of headrace-mini rest on: that it says what the list says it does."""
    items.sort(key=lambda item: item.path.name != "test_mini_shipped.py")
