"""Tests that a server stores cached prefixes in the user's cache folder by default.

tests/e2e/test_disk_prefixes.py kills servers and reads the prefixes again.
"""

from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

TOKENS = 2000
PROMPT = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(TOKENS))  # a byte is a token
FLAGS = ("--threads", "1", "--max-step-tokens", "64", "--kernels", "plain")


def num_cached(server: ServerProcess, prompt: str) -> int:
    fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_server_stores_long_prompts_by_default(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=4096, num_hidden_layers=6)
    cache, num_blocks = tmp_path / "cache", (TOKENS - 1) // 32
    root = cache / "headrace" / "prefixes"

    def runs() -> list[str]:
        return [path.name for path in root.glob("*/*-*-*")]

    with running_server(str(model), *FLAGS, environment={"XDG_CACHE_HOME": str(cache)}) as server:
        assert num_cached(server, "short" * 40) == num_cached(server, PROMPT) == 0
        eventually(lambda: any(name.endswith(f"-{num_blocks}") for name in runs()))
        assert not any(name.endswith("-0-6") for name in runs()), "the short prompt is not stored"
        assert any(f"are stored in {root}" in line for line in server.lines)
        for path in (root, *root.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
