"""Tests that run the programs of docs/guides/python.md."""

import re
from pathlib import Path

import pytest

from tools.harness.servers import ServerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "python.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# A word that identifies each program, and a text that it has to print.
EXPECTED = {
    "client.models()": "23 + 45 = 68",
    "tool_calls": "get_weather ",
    "again = client": "tokens",
    "both = llm": "[' Wednesday, Thursday",
    "plan = llm": "native-text blocks",
    "except": "temperature",
}


def test_every_program_has_an_expected_output() -> None:
    for text in PROGRAMS:
        assert sum(word in text for word in EXPECTED) == 1, text


@pytest.mark.parametrize("word", EXPECTED)
def test_a_program_prints_its_expected_output(
    word: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = [program for program in PROGRAMS if word in program]
    exec(compile(text.replace("localhost:8000", server.url), "python.md", "exec"), {})
    assert EXPECTED[word] in capsys.readouterr().out
