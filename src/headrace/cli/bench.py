"""`headrace bench`: measures servers from outside, using only HTTP."""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import click

from headrace.cli.help import Verbs
from headrace_common.errors import ConfigError, HeadraceError


@click.group(cls=Verbs)
def bench() -> None:
    """Measure servers over HTTP."""


@bench.command(short_help="Measure long prompts while streams run.")
@click.option(
    "--url", "urls", multiple=True, default=["http://127.0.0.1:8000"], show_default=True,
    metavar="URL", help="URL of a server, or LABEL=URL; may be repeated",
)  # fmt: skip
@click.option(
    "--profile",
    type=click.Choice(["ratios", "wall", "quick"]),
    default="ratios",
    show_default=True,
    help="ratios: lengths and rates for the machine's speed (takes nearly an hour); "
    "wall: 4 streams and prompts of 2,048 tokens (two minutes); quick: a smoke test",
)
@click.option("--quick", is_flag=True, help="The same as --profile quick")
@click.option(
    "--json",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all results to this file",
)
@click.option(
    "--plot",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write plots to this folder",
)
@click.option(
    "--limits",
    type=(float, float),
    metavar="TTFT_MS GAP_MS",
    help="Report the fraction of prompts within both limits, TTFT_MS and GAP_MS",
)
@click.option(
    "--warm-share",
    type=click.FloatRange(0, 1),
    metavar="FRACTION",
    default=0.0,
    show_default=True,
    help="Fraction of the long prompts that repeat an earlier prompt with a new end",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Number from which prompts are drawn"
)
@click.option(
    "--api-key", metavar="KEY", envvar="HEADRACE_API_KEY", default="", help="API key of the servers"
)
def mixed(urls: tuple[str, ...], file: Path | None, folder: Path | None, **given: Any) -> None:
    """Measure how long streams stall while long prompts arrive, and how long those prompts take.

    \b
    headrace bench mixed --profile wall
    headrace bench mixed --url on=localhost:8000 --url off=localhost:8001
    """
    import httpx

    from headrace.bench.mixed import Options, measure
    from headrace.bench.profile import PROFILES
    from headrace.bench.report import report, table, write
    from headrace.bench.target import ServerSaid
    from headrace.client.errors import Unreachable
    from headrace.client.http import reason_of

    _check_outputs(file, folder)
    options = Options(
        profile=PROFILES["quick" if given["quick"] else given["profile"]],
        seed=given["seed"],
        warm_share=given["warm_share"],
        api_key=given["api_key"],
    )
    try:
        runs = asyncio.run(measure([_labelled(url) for url in urls], options, _say))
    except httpx.TransportError as error:
        raise Unreachable(
            f"No server answers ({reason_of(error)}); start one with `headrace serve`, or set "
            "its address with --url."
        ) from None
    except ServerSaid as error:
        raise HeadraceError(f"The server cannot be measured. {error}") from None
    print(table(runs))
    if file is not None:
        write(file, report(runs, options, given["limits"]))
    if folder is not None:
        from headrace.bench.plots import draw

        draw(runs, folder)


def _labelled(url: str) -> tuple[str, str]:
    from headrace.client.http import to_address

    label, found, rest = url.partition("=")
    if found and "/" not in label:
        return to_address(rest), label
    address = to_address(url)
    return address, address.partition("//")[2]


def _check_outputs(file: Path | None, folder: Path | None) -> None:
    """Raise ConfigError if the results could not be stored. Called before a long measurement."""
    if folder is not None and not importlib.util.find_spec("matplotlib"):
        raise ConfigError("--plot needs matplotlib; install it with: pip install headrace[bench]")
    if file is not None and file.is_dir():
        raise ConfigError(f"--json: {file} is a folder; give a file.")
    for name, needed in (("--json", file and file.parent), ("--plot", folder)):
        if needed is None:
            continue
        try:
            needed.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{name}: {needed} cannot be created: {error.strerror}.") from None
        if not os.access(needed, os.W_OK | os.X_OK):
            raise ConfigError(f"{name}: {needed} is not writable; choose another folder.")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
