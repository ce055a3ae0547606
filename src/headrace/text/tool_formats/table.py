"""The formats by name: each is a module here, and its name stands in the settings alone.

Harmony is more than a format of calls: see output_splitter.py.
"""

from functools import cache
from importlib import import_module
from typing import get_args

from headrace.text.tool_formats.format import ToolFormat
from headrace.text.tool_formats.generic import GENERIC
from headrace_common.config.settings import ToolFormatName


@cache
def format_of(name: str) -> ToolFormat:
    """The format of that name."""
    module = import_module(f"headrace.text.tool_formats.{name.replace('-', '_')}")
    found: ToolFormat = module.FORMAT
    return found


def tool_format(template: str) -> str:
    """The name of the format that a chat template speaks of; hermes, the commonest, if of none.

    "" without a template, and generic if it takes no tools.
    """
    if "tools" not in template:
        return GENERIC if template else ""
    signs = ((name, format_of(name).sign) for name in get_args(ToolFormatName))
    return next((name for name, sign in signs if sign and sign in template), "hermes")
