"""Writes docs/cli.md from the command's own help: `python -m tools.make_cli_docs`."""

from pathlib import Path

import click

from headrace.cli.main import cli

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
INTRODUCTION = """# Command line

Written by `python -m tools.make_cli_docs` from the help of each verb.

Every flag of `serve` is also a variable, `HEADRACE_` and its name in capitals
(`HEADRACE_MAX_NUM_SEQS`; the keys are `HEADRACE_API_KEYS`; lists are comma-separated), and a key in
the `[serve]` table of the TOML file that `--config` names. A flag beats the environment, the
environment the file, the file the default.

Exit codes: 0 done or stopped as asked, 1 the verb failed, 2 a wrong flag, variable or file, 3 the
model cannot be served, 4 the engine was given up, 5 port or state directory in use, 6 a part of the
server ended by itself (start it again; streams with a name or a key go on), 130 interrupted.
"""


def page() -> str:
    """The whole page, for a terminal of 100 columns."""
    return "\n".join([INTRODUCTION, *_verbs(cli, "headrace")])


def _verbs(command: click.Command, path: str) -> list[str]:
    context = click.Context(command, info_name=path, terminal_width=100, max_content_width=100)
    shown = [f"## `{path}`\n\n```text\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for name, verb in sorted(command.commands.items()):
            shown += _verbs(verb, f"{path} {name}")
    return shown


if __name__ == "__main__":
    PAGE.write_text(page())
