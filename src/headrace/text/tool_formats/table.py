"""Finds tool formats by name; each format is a module in this folder.

Harmony is more than a format of calls, so output_splitter.py handles Harmony.
"""

from functools import cache
from importlib import import_module
from typing import get_args

from headrace.text.tool_formats.format import ToolFormat
from headrace.text.tool_formats.generic import GENERIC
from headrace_common.config.settings import ToolFormatName


@cache
def format_of(name: str) -> ToolFormat:
    """Return the format with this name."""
    module = import_module(f"headrace.text.tool_formats.{name.replace('-', '_')}")
    found: ToolFormat = module.FORMAT
    return found


def tool_format(template: str) -> str:
    """Return the tool format that a chat template uses.

    Returns "" without a template, and generic if the template does not support tools. Returns
    hermes, the most common format, if the template's format is not recognized.
    """
    if "tools" not in template:
        return GENERIC if template else ""
    signs = ((name, sign) for name in get_args(ToolFormatName) for sign in format_of(name).signs)
    return next((name for name, sign in signs if sign in template), "hermes")
