"""Writes docs/reference/cli.md from the command's help texts: `python -m tools.make_cli_docs`."""

from pathlib import Path

import click

from headrace.cli.main import cli

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
WIDTH = 80
INTRODUCTION = """# Command line

Written by `python -m tools.make_cli_docs` from the help of each command.

Every flag of `serve` is also an environment variable: `HEADRACE_` and the flag's name in capitals,
such as `HEADRACE_MAX_NUM_SEQS`. Lists are comma-separated, and the variable of `--api-key` is
`HEADRACE_API_KEYS`. Every flag is also a key in the table `[serve]` of the file for `--config`.
Flags take precedence over the environment, the environment over the file, and the file over the
defaults. `--help-all` shows the flags that this page leaves out, and
[configuration](configuration.md) describes all of them.

| exit code | meaning |
|---|---|
| 0 | done; or the server stopped after Ctrl-C or SIGTERM |
| 1 | the command failed |
| 2 | a wrong flag, variable or file |
| 3 | the model cannot be served |
| 4 | the engine failed too often |
| 5 | the port or the state directory is in use |
| 6 | a part of the server failed; start the server again to continue resumable streams |
| 130 | Ctrl-C ended a command other than `serve`, or `make` with a server that it started |
"""


def page() -> str:
    """Return the whole page, for a terminal of 80 columns."""
    return "\n".join([INTRODUCTION, *_verbs(cli, "headrace")])


def _verbs(command: click.Command, path: str) -> list[str]:
    context = click.Context(command, info_name=path, terminal_width=WIDTH)
    shown = [f"## `{path}`\n\n```text\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for name, verb in sorted(command.commands.items()):
            shown += _verbs(verb, f"{path} {name}")
    return shown


if __name__ == "__main__":
    PAGE.write_text(page())
