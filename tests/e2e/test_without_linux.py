"""Tests of a server without features that only Linux has."""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tools.harness.servers import running_server, said

NO_UNIX = "import sys; sys.modules['fcntl'] = sys.modules['resource'] = None"
TAKEN_AWAY = """
import os, pathlib, sys
for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity"):
    vars(os).pop(name, None)
sys.platform = "other"

def hidden(method, answer):
    def ask(self, *arguments, **options):
        if str(self).startswith(("/proc", "/sys")):
            if answer is None:
                raise FileNotFoundError(2, "There is no such folder", str(self))
            return answer
        return method(self, *arguments, **options)
    return ask

for name, answer in (("read_text", None), ("is_file", False), ("is_dir", False), ("exists", False)):
    setattr(pathlib.Path, name, hidden(getattr(pathlib.Path, name), answer))
"""
ASKED = {
    "messages": [{"role": "user", "content": "Count from 1 to 20."}],
    "temperature": 0,
}


def without(tmp_path: Path, code: str) -> dict[str, str]:
    """Return an environment in which Python runs `code` at startup."""
    (tmp_path / "sitecustomize.py").write_text(code)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def test_windows_is_refused_with_a_one_line_message(tmp_path: Path) -> None:
    environment = os.environ | without(tmp_path, NO_UNIX)
    command = [sys.executable, "-m", "headrace", "serve", "headrace-mini"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert said(ended.stderr) == [
        "headrace: This command needs Linux or macOS; on Windows, run it in WSL."
    ]


def test_a_server_without_linux_features_survives_an_engine_kill(tmp_path: Path) -> None:
    with running_server("headrace-mini", environment=without(tmp_path, TAKEN_AWAY)) as server:
        before = httpx.post(f"{server.url}/v1/chat/completions", json=ASKED, timeout=120).json()
        server.kill_engine()
        after = httpx.post(f"{server.url}/v1/chat/completions", json=ASKED, timeout=120).json()
    assert before["choices"] == after["choices"]
    assert "20" in before["choices"][0]["message"]["content"]
