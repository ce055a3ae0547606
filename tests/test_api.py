"""Tests the public names of `import headrace` as another project uses them."""

import subprocess
import sys
from pathlib import Path

import pytest

import headrace

PROGRAM = """
from headrace import AsyncClient, Client, Stream, Unreachable
client = Client("localhost:8000")
stream = client.stream("hello")
reveal_type(stream)
reveal_type(client.chat("hello").text)
reveal_type(AsyncClient().stream("hello"))
reveal_type(Unreachable("away").code)
client.chat(5)
client.chatt("hello")
"""
# Checking the modules behind LLM takes half a minute, and httpx some seconds.
SETTINGS = """
[mypy]
follow_imports = silent
[mypy-headrace.llm.host,httpx.*]
follow_imports = skip
"""
SEEN = (
    'Revealed type is "headrace.client.client.Stream"',
    'Revealed type is "str"',
    'Revealed type is "headrace.client.async_client.AsyncStream"',
    'matches argument type "int"',
    '"Client" has no attribute "chatt"',
)


def test_every_public_name_exists() -> None:
    for name in headrace.__all__:
        assert getattr(headrace, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        headrace.Klient  # type: ignore[attr-defined]  # noqa: B018


def test_completion_offers_the_public_names() -> None:
    assert set(headrace.__all__) <= set(dir(headrace))
    assert "importlib" not in dir(headrace)


def test_a_type_checker_of_another_project_finds_the_classes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    said = subprocess.run(
        [sys.executable, "-m", "mypy", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    ).stdout
    for line in SEEN:
        assert line in said, said
    assert '"Any"' not in said


def test_a_program_with_every_call_passes_a_strict_type_check(tmp_path: Path) -> None:
    program = (Path(__file__).parent / "typed_program.py").read_text()
    wrong = 'SamplingOptions(temperatur=1)\nLLM(quantize="int7")\nClient().chat(5)\n'
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "wrong.py").write_text("from headrace import *\n" + wrong)
    (tmp_path / "mypy.ini").write_text(SETTINGS + "[mypy-numpy.*]\nfollow_imports = normal\n")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py", "wrong.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert [line.partition(": error:")[0] for line in errors] == [
        f"wrong.py:{n}" for n in (2, 3, 4)
    ]


def test_a_client_needs_no_tensors() -> None:
    code = "from headrace import Client, Unreachable; import sys; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
