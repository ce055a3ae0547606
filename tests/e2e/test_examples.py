"""Tests of the Python examples; `make test-clients` runs those in JavaScript."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stress.witness import Fates, Proxy
from tools.harness.servers import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


async def run(name: str, url: str, *prompts: str) -> str:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, str(EXAMPLES / name), url, *prompts)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, trouble = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, trouble.decode()
    return out.decode()


def test_the_resume_example_survives_repeated_connection_loss(server: ServerProcess) -> None:
    async def through_cuts() -> tuple[str, int]:
        proxy = Proxy(int(server.url.rpartition(":")[2]), Fates("example", 0.8))
        await proxy.open()
        said = await run("resume.py", f"http://127.0.0.1:{proxy.port}", "Count from 1 to 100.")
        proxy.close()
        return said, proxy.num_cuts

    said, num_cuts = asyncio.run(through_cuts())
    assert said.count("97, 98, 99, 100") == said.count(" 50,") == 1 and num_cuts > 0


def test_the_realtime_example_sends_several_prompts_over_one_websocket(
    server: ServerProcess,
) -> None:
    prompts = ("Count from 1 to 12.", "Spell the word banana.")
    said = asyncio.run(run("realtime.py", server.url, *prompts))
    assert "10, 11, 12" in said and "b-a-n-a-n-a" in said


@pytest.mark.parametrize("words", [(), ("--help",)])
@pytest.mark.parametrize("name", ["resume.py", "realtime.py", "resume.mjs", "realtime.mjs"])
def test_an_example_prints_its_usage_without_arguments_or_with_help(
    name: str, words: tuple[str, ...]
) -> None:
    program = sys.executable if name.endswith(".py") else shutil.which("node")
    if program is None:
        pytest.skip("needs node")
    command = (program, str(EXAMPLES / name), *words)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = ended.stdout + ended.stderr
    assert said.startswith(f"usage: {'' if name.endswith('.py') else 'node '}{name}")
    assert "Traceback" not in said and "    at " not in said
