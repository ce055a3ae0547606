"""The `headrace` command: verbs, flags, exit codes. Heavy imports wait for their verb."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from headrace import __version__
from headrace.cli import exits
from headrace.core.errors import ConfigError, ModelError
from headrace.core.settings import Setting, load, settings


def _option(setting: Setting) -> click.Option:
    kind: Any = click.Choice(setting.choices) if setting.choices else str
    shown = setting.default if setting.default not in (None, ()) else None
    return click.Option(
        [*setting.flags, setting.name],
        type=kind,
        multiple=setting.is_list,
        default=None,
        help=setting.description + (f"  [default: {shown}]" if shown is not None else ""),
    )


def _serve_command() -> click.Command:
    def run(model: str | None, config_file: Path | None, **flags: Any) -> None:
        """Serve MODEL over HTTP: a folder, or headrace-mini (the default).

        \b
        headrace serve
        headrace serve ./my-model --max-num-seqs 8 --port 9000
        """
        from headrace.cli.serve import serve

        given = {name: value for name, value in flags.items() if value not in (None, ())}
        if model is not None:
            given["model"] = model
        sys.exit(serve(load(given, os.environ, config_file)))

    file = click.Path(dir_okay=False, path_type=Path)
    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        click.Option(
            ["--config", "config_file"], type=file, help="TOML file; its [serve] table is read"
        ),
    ]
    params += [_option(setting) for setting in settings() if setting.name != "model"]
    return click.Command("serve", callback=run, params=params, help=run.__doc__)


@click.group()
@click.version_option(__version__)
def cli() -> None:
    """An LLM inference server whose streams are never silent, never stalled, never lost."""


cli.add_command(_serve_command())


def main() -> None:
    """Entry point; every expected failure is one line on stderr and its exit code."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(exits.INTERRUPTED)
    except click.ClickException as error:
        _fail(exits.CONFIG, error.format_message())
    except ConfigError as error:
        _fail(exits.CONFIG, str(error))
    except ModelError as error:
        _fail(exits.MODEL, str(error))


def _fail(code: int, message: str) -> None:
    print(f"headrace: {message}", file=sys.stderr)
    sys.exit(code)
