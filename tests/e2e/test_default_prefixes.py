"""By default, a server stores cached prefixes in the user's cache folder, where there is room."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

TOKENS = 2000
PROMPT = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(TOKENS))  # a byte is a token
FLAGS = ("--threads", "1", "--max-step-tokens", "64", "--kernels", "plain")


@contextmanager
def serving(model: Path, cache: Path, *flags: str) -> Iterator[ServerProcess]:
    home = {"XDG_CACHE_HOME": str(cache)}
    with running_server(str(model), *FLAGS, *flags, environment=home) as server:
        yield server


def num_cached(server: ServerProcess, prompt: str = PROMPT) -> int:
    fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def stored(cache: Path) -> list[Path]:
    return list((cache / "headrace" / "prefixes").glob("*/*-*-*"))


def test_a_killed_server_finds_its_prompts_by_default(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=4096, num_hidden_layers=6)
    cache, full = tmp_path / "cache", (TOKENS - 1) // 32 * 32
    with serving(model, cache) as server:
        assert num_cached(server, "short" * 40) == 0
        assert num_cached(server) == 0
        eventually(lambda: any(path.name.endswith(f"-{full // 32}") for path in stored(cache)))
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(30)
    assert not any(path.name.endswith("-0-6") for path in stored(cache)), "not the short prompt"
    root = cache / "headrace" / "prefixes"
    assert any(f"are stored in {root}" in line for line in server.lines)
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    with serving(model, cache) as server:
        assert num_cached(server) >= full - 256


def test_a_server_that_stores_no_streams_stores_no_prefixes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    with serving(model, tmp_path, "--state-dir", "none") as server:
        num_cached(server)
    assert not (tmp_path / "headrace" / "prefixes").exists()
