"""`headrace bench`: measures servers from outside, using only HTTP."""

import asyncio
import contextlib
import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.help import SectionedGroup
from headrace.cli.private_server import ServerEnded, end_on_hangup, private_server
from headrace.cli.server_options import key_or_first
from headrace_common.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.bench.grid import Grid
    from headrace.bench.results import MatrixResults


class Several(click.ParamType[tuple[Any, ...]]):
    """Values of one type, separated by commas."""

    def __init__(self, one: click.ParamType[Any]) -> None:
        self._one = one
        self.name = one.name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        found = tuple(self._one.convert(part.strip(), param, ctx) for part in value.split(","))
        if any(isinstance(it, float) and not math.isfinite(it) for it in found):
            self.fail(f"{value!r} is not a list of numbers.", param, ctx)
        return found


_CHUNKING = click.Choice(["off", "tokens", "time"])


def _with_outputs(about_file: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that all benchmarks have."""
    path = click.Path(path_type=Path)
    options = [
        click.option("--json", "file", type=path, metavar="FILE", help=about_file),
        click.option(
            "--plot", "folder", type=path, metavar="FOLDER", help="Write plots to this folder"
        ),
        click.option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            help="Random seed of the prompts",
        ),
        click.option(
            "--api-key",
            metavar="KEY",
            envvar="HEADRACE_API_KEY",
            default="",
            help="API key of the servers",
        ),
    ]

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(cls=SectionedGroup)
def bench() -> None:
    """Measure servers over HTTP."""


@bench.command(short_help="Measure long prompts while streams run.")
@click.option(
    "--url", "urls", multiple=True, default=["http://127.0.0.1:8000"], show_default=True,
    metavar="URL", help="URL of a server, or LABEL=URL; may be repeated",
)  # fmt: skip
@click.option(
    "--profile",
    type=click.Choice(["wall", "quick"]),
    default="wall",
    show_default=True,
    help="wall: 4 streams and prompts of 2,048 tokens (two minutes); quick: a smoke test",
)
@click.option("--quick", is_flag=True, help="The same as --profile quick")
@_with_outputs("Write all results to this file")
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
def mixed(urls: tuple[str, ...], file: Path | None, folder: Path | None, **given: Any) -> None:
    """Measure how long streams stall while long prompts arrive, and how long those prompts take.

    \b
    headrace bench mixed
    headrace bench mixed --url on=localhost:8000 --url off=localhost:8001
    """
    from headrace.bench.mixed import Options, measure
    from headrace.bench.profile import PROFILES
    from headrace.bench.report import report, table, write

    _check_outputs(file, folder)
    options = Options(
        profile=PROFILES["quick" if given["quick"] else given["profile"]],
        seed=given["seed"],
        warm_share=given["warm_share"],
        api_key=given["api_key"],
    )
    with _errors_explained():
        runs = asyncio.run(measure([_labelled(url) for url in urls], options, _say))
    print(table(runs))
    if file is not None:
        write(file, report(runs, options, given["limits"]))
    if folder is not None:
        from headrace.bench.plots import draw

        draw(runs, folder)


@bench.command(short_help="Measure how chunked prefill affects latency.")
@click.argument("model", required=False)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", metavar="URL", help="Measure the server at this URL instead of starting one")
@click.option(
    "--chunking",
    type=Several(_CHUNKING),
    metavar="NAMES",
    help="off: each prompt in one step; tokens: 512 tokens per step; time: the default stall "
    "target  [default: off,tokens,time]. With --url, the mode of this server",
)
@click.option(
    "--grid",
    "name",
    type=click.Choice(["full", "short"]),
    default="full",
    show_default=True,
    help="full: 54 loads for a tiny model; short: 4 loads for a model of 0.5 billion parameters",
)
@click.option(
    "--streams", type=Several(click.IntRange(1, 1024)), metavar="LIST",
    help="Numbers of streams, such as 2,8, instead of those of the profile",
)  # fmt: skip
@click.option(
    "--rates", type=Several(click.FloatRange(0, 1000, min_open=True)), metavar="LIST",
    help="Prompts per second",
)  # fmt: skip
@click.option(
    "--lengths", type=Several(click.IntRange(2, 1 << 20)), metavar="LIST",
    help="Tokens per prompt",
)  # fmt: skip
@click.option(
    "--cached", type=Several(click.FloatRange(0, 1, max_open=True)), metavar="LIST",
    help="Fractions of each prompt that the server has in its cache",
)  # fmt: skip
@click.option(
    "--prompts", "num_prompts", type=click.IntRange(1, 10_000), metavar="N",
    help="Prompts per cell",
)  # fmt: skip
@_with_outputs("Save each cell to this file as it finishes. If the file exists, resume from it")
def matrix(
    model: str | None, flags: tuple[str, ...], url: str | None, file: Path | None, **given: Any
) -> None:
    """Measure how chunked prefill affects latency: the time between tokens of running streams, and
    the time to first token of long prompts that arrive meanwhile.

    Starts one server per chunking mode for MODEL, each with FLAGS.

    \b
    headrace bench matrix MODEL --json matrix.json --plot plots -- --threads 2
    headrace bench matrix --url localhost:8000 --chunking time --grid short
    """
    from msgspec.structs import replace

    from headrace.bench.grid import GRIDS
    from headrace.bench.report import commit, machine
    from headrace.bench.results import Conditions, open_results

    if (model is None) == (url is None):
        raise ConfigError("Give a MODEL to serve, or the --url of a running server.")
    names: tuple[str, ...] = given["chunking"] or (("time",) if url else _CHUNKING.choices)
    if url and len(names) != 1:
        raise ConfigError("--url measures one server, so give --chunking one mode.")
    _check_outputs(file, given["folder"])
    dimensions = ("streams", "rates", "lengths", "cached", "num_prompts")
    grid = replace(GRIDS[given["name"]], **{k: given[k] for k in dimensions if given[k]})
    conditions = Conditions(
        model=url or str(model),
        flags=flags,
        machine=machine(),
        revision=commit(),
        seed=given["seed"],
        num_prompts=grid.num_prompts,
    )
    results = open_results(file, conditions, shlex.join(["headrace", *sys.argv[1:]]))
    _measure_missing(grid, results, names, file, given["api_key"], url)
    print(results.table())
    if given["folder"] is not None:
        from headrace.bench.plots import draw_matrix

        draw_matrix(results.rows, given["folder"])


def _measure_missing(
    grid: "Grid",
    results: "MatrixResults",
    names: tuple[str, ...],
    file: Path | None,
    api_key: str,
    url: str | None,
) -> None:
    """Measure the cells that are missing, on the server at `url` or on temporary servers."""
    from headrace.bench.grid import server_flags
    from headrace.bench.matrix import measure
    from headrace.client.http import to_address

    end_on_hangup()
    made_for = results.conditions
    with _errors_explained(), contextlib.ExitStack() as stack:
        urls = {}
        for name in dict.fromkeys(names):
            if not results.missing(name, grid.loads()):
                continue
            if url:
                urls[name] = to_address(url)
                continue
            _say(f"{name}: starting a server for {made_for.model}")
            server = private_server(made_for.model, *made_for.flags, *server_flags(name, grid))
            urls[name] = stack.enter_context(server)
        asyncio.run(measure(urls, grid, results, file, key_or_first(api_key), _say))


@contextlib.contextmanager
def _errors_explained() -> Iterator[None]:
    """Convert errors of servers and connections into errors that say what to do."""
    import httpx

    from headrace.bench.target import ServerSaid
    from headrace.client.errors import Unreachable
    from headrace.client.http import reason_of

    try:
        yield
    except httpx.TransportError as error:
        raise Unreachable(
            f"No server answers ({reason_of(error)}); start one with `headrace serve`, or set "
            "its address with --url."
        ) from None
    except ServerSaid as error:
        raise HeadraceError(f"The server cannot be measured. {error}") from None
    except ServerEnded as ended:
        raise SystemExit(ended.code) from None


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
        raise ConfigError("--plot needs matplotlib; run pip install '.[bench]' in the checkout.")
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
