"""Tests that run every command and program of the README."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.harness.servers import ServerProcess

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The set-up commands have already run in every checkout that runs these tests.
_SET_UP = re.compile(r"make serve ARGS=smollm2\n")
README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = [(kind, text) for kind, text in _BLOCK.findall(README) if not _SET_UP.fullmatch(text)]
# A word that identifies each block, and a text that it has to print.
EXPECTED = {
    "sentences about the sea": "data: [DONE]",
    "from openai": "headrace-mini",
    "seq -s": '"prompt_progress":{"total":',
    "X-Conversation-Id": "no byte is missing",
    "kill -9": '"recovering":{"attempt":1}',
}


def adapted(text: str, server: ServerProcess) -> str:
    """Replace the README's server address, prompts and pauses by those of the test."""
    text = text.replace("http://127.0.0.1:8000", server.url)
    # headrace-mini writes no stories, and it is quicker than the model of the README.
    for story in ("Write a long story.", "Tell me a story."):
        text = text.replace(story, "Count from 1 to 150.")
    text = text.replace("--max-time 2", "--max-time 0.3").replace("sleep 2", "sleep 0.5")
    return text.replace(".venv/bin/headrace", f"{sys.executable} -m headrace")


def test_every_block_has_an_expected_output() -> None:
    for _, text in BLOCKS:
        assert sum(word in text for word in EXPECTED) == 1, text


def test_every_redirected_curl_command_is_silent() -> None:
    kept = [one for _, text in BLOCKS for one in re.findall(r"\bcurl[^;|]*?[>|] ?\w+", text)]
    assert len(kept) == 4 and all(re.search(r" (-s|--silent) ", one) for one in kept)


@pytest.mark.parametrize("word", EXPECTED)
def test_a_block_prints_its_expected_output(
    word: str, server: ServerProcess, tmp_path: Path
) -> None:
    ((kind, text),) = [block for block in BLOCKS if word in block[1]]
    program = ["bash", "-c"] if kind == "sh" else [sys.executable, "-c"]
    ended = subprocess.run(
        [*program, adapted(text, server)],
        input="Count from 1 to 10.",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HEADRACE_URL": server.url, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0 and EXPECTED[word] in ended.stdout, ended
