"""The names of tool formats and their modules."""

from typing import get_args

import pytest

from headrace.text.tool_formats.table import format_of, tool_format
from headrace_common.config.settings import ToolFormatName


@pytest.mark.parametrize("name", get_args(ToolFormatName))
def test_a_template_with_the_marker_of_a_format_has_that_format(name: str) -> None:
    signs = format_of(name).signs
    templates = [f"{{{{ tools }}}} {sign}" for sign in signs] or ["knows none"]
    assert {tool_format(template) for template in templates} == {name}


def test_a_template_of_llama_4_that_asks_for_json_has_the_format_of_llama_3() -> None:
    assert (
        tool_format("""{{ tools }} <|python_start|> {"name": "", "parameters": {}}""") == "llama3"
    )


def test_a_template_with_tools_but_no_marker_has_the_most_common_format() -> None:
    assert tool_format("{{ tools }}") == "hermes"
    assert tool_format("") == ""
