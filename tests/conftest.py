"""Settings and fixtures of all tests. One compute thread makes results reproducible."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests with a cache folder of their own would compile all kernels again.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache"))
# No test shares the user's folder of cached prefixes.
os.environ.setdefault("HEADRACE_PREFIX_CACHE_DIR", "none")
# The exporter's thread may outlive its test, and other tests assert what is logged.
for name in ("opentelemetry", "urllib3"):
    logging.getLogger(name).setLevel(logging.CRITICAL + 1)
# Use the same examples in every run; `make test ARGS=--hypothesis-profile=default` tries new ones.
settings.register_profile("suite", derandomize=True)
settings.load_profile("suite")
LONG = {
    "attack/test_attack",
    "attack/test_hostile_folders",
    "attack/test_watched",
    "chaos/test_chaos",
    "checkpoints/test_find",
    "checkpoints/test_gguf",
    "cli/test_chat",
    "cli/test_download",
    "cli/test_exit_codes",
    "cli/test_launch",
    "cli/test_verbs",
    "client/test_clients",
    "e2e/test_adapters",
    "e2e/test_aliases",
    "e2e/test_batch_kills",
    "e2e/test_batch_models",
    "e2e/test_batch_owners",
    "e2e/test_batches",
    "e2e/test_default_prefixes",
    "e2e/test_desired",
    "e2e/test_disk_prefixes",
    "e2e/test_every_route",
    "e2e/test_full_disk",
    "e2e/test_generic_tools",
    "e2e/test_guess_requests",
    "e2e/test_hybrid",
    "e2e/test_image_chats",
    "e2e/test_infill",
    "e2e/test_llama_routes",
    "e2e/test_loads",
    "e2e/test_long_responses",
    "e2e/test_models",
    "e2e/test_native_images",
    "e2e/test_ollama_command_line",
    "e2e/test_ollama_models",
    "e2e/test_openai_leaving",
    "e2e/test_operations",
    "e2e/test_packed",
    "e2e/test_pulls",
    "e2e/test_readme",
    "e2e/test_realtime",
    "e2e/test_replicas",
    "e2e/test_rerank",
    "e2e/test_responses",
    "e2e/test_responses_socket",
    "e2e/test_resume",
    "e2e/test_same_to_the_bit",
    "e2e/test_seq2seq",
    "e2e/test_shutdown",
    "e2e/test_signs",
    "e2e/test_spoiled_state",
    "e2e/test_stopped",
    "e2e/test_strict_templates",
    "e2e/test_traces",
    "e2e/test_without_linux",
    "engine/test_supervisor",
    "equality/test_adapters",
    "equality/test_disk_prefixes",
    "equality/test_guess",
    "equality/test_lanes_experts",
    "equality/test_lanes_hybrid",
    "equality/test_lanes_images",
    "equality/test_lanes_native",
    "equality/test_pressure",
    "equality/test_together",
    "kernels/test_attention",
    "kernels/test_compiler",
    "kernels/test_experts",
    "kernels/test_inner_loops",
    "kernels/test_linear",
    "protocols/test_histories",
    "runner/test_load",
    "runner/test_mapped_experts",
    "simulator/test_planted_bugs",
    "simulator/test_planted_in_server",
    "simulator/test_simulator",
    "text/test_encoder",
    "text/test_windowed_encoding",
    "tools/test_check_family",
    "workers/test_pool",
}
"""Files that take about ten seconds or more each. Only `make test-all` runs them."""
# Other make targets run these folders, most of them in environments of their own.
collect_ignore = ["agents", "clients", "cluster", "llama", "ops", "package", "trained", "web"]


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run in an event loop of their own."""
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the long files, too")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the long files, except those that the command line names."""
    name = str(collection_path.relative_to(Path(__file__).parent).with_suffix(""))
    return True if name in LONG and not config.getoption("--all") else None


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model. Tests must not change it."""
    from tools.harness.tiny_models import make_tiny_model  # it imports torch

    return make_tiny_model(tmp_path_factory.mktemp("shared") / "tiny")


@pytest.fixture(autouse=True)
def no_key() -> None:
    """Forget the API key that an earlier test used."""
    from headrace.workers.job_queue import OWNER

    OWNER.set("")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test first that headrace-mini works, because many tests use it."""
    items.sort(key=lambda item: item.path.name != "test_mini_shipped.py")
