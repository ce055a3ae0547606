"""`headrace batch FILE`: sends a file of requests to a server, which answers them while it is
idle.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from headrace.cli import exit_codes
from headrace.cli.load_lines import LoadView
from headrace.cli.logs import say
from headrace.cli.server_options import key_or_first, server_options
from headrace_common.errors import ConfigError
from headrace_common.loading import LoadProgress

if TYPE_CHECKING:
    from headrace.client.batches import BatchClient

_MAX_TOLD = 10


@click.command(
    short_help="Answer a file of requests while the server is idle.", params=server_options()
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-O", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="File for the results  [default: FILE with .results before its suffix]",
)  # fmt: skip
@click.option(
    "--hours", type=click.IntRange(1, 720), metavar="HOURS", default=24, show_default=True,
    help="Hours after which unanswered requests expire",
)  # fmt: skip
@click.option("--again", is_flag=True, help="Start again, even if this file was sent before")
@click.option("--cancel", is_flag=True, help="Cancel the batch of this file")
def batch(
    file: Path, output: Path | None, hours: int, again: bool, cancel: bool, **server: Any
) -> None:
    """Send a FILE of requests to a server and write all results to a file.

    Each line of FILE is a request: {"custom_id": "a", "method": "POST", "url":
    "/v1/chat/completions", "body": {...}}; all lines have the same url. The server answers them
    while it has no other requests. After Ctrl-C the batch continues on the server; run the same
    command again to follow it. The exit code is 1 if a request failed.

    \b
    headrace batch requests.jsonl
    headrace batch requests.jsonl --output answers.jsonl --hours 72
    headrace batch requests.jsonl --cancel
    """
    from headrace.client.batches import BatchClient, digest_of
    from headrace.client.http import URL

    key = key_or_first(server["api_key"]) or None
    output = output or file.with_suffix(f".results{file.suffix}")
    if not cancel:
        check_output(output)
    digest = digest_of(file)
    with BatchClient(server["url"] or URL, key, _trouble) as client:
        begun = None if again else client.begun(digest)
        if cancel:
            sys.exit(_cancel(client, begun))
        if begun is not None:
            say(f"{begun['id']} was started before and continues; use --again to start a new one.")
        sys.exit(_follow(client, begun or client.begin(file, digest, hours), output))


def check_output(path: Path) -> None:
    """Raise ConfigError if the results could not be written. Called before any request is sent."""
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; give a file.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        why = "is not writable" if path.parent.exists() else "does not exist"
        raise ConfigError(
            f"--output: the folder {path.parent} {why}; create it, or choose another."
        )


def _cancel(client: "BatchClient", begun: dict[str, Any] | None) -> int:
    if begun is None:
        say("headrace: no batch of this file is running.")
        return exit_codes.FAILED
    client.cancel(begun)
    say(f"{begun['id']}: cancelled; the remaining requests are not answered.")
    return exit_codes.DONE


def _follow(client: "BatchClient", first: dict[str, Any], output: Path) -> int:
    from headrace.client.batches import ENDED

    begun = first
    try:
        with LoadView() as view:
            for begun in client.follow(first):
                if begun["status"] not in ENDED:
                    view(_progress(begun))
        say(_progress(begun).words)
    except KeyboardInterrupt:
        say(f"{begun['id']} continues on the server; run the same command again to follow it.")
        return exit_codes.INTERRUPTED
    for fault in ((begun["errors"] or {}).get("data") or ())[:_MAX_TOLD]:
        say(f"headrace: line {fault['line']}: {_place(fault)}{fault['message']}")
    if begun["status"] == "failed":
        return exit_codes.FAILED
    with _written(output) as file:
        for id in (begun["output_file_id"], begun["error_file_id"]):
            for piece in client.results(id):
                file.write(piece)
    say(f"{output}: {begun['request_counts']['total']} results, in the order of completion.")
    is_whole = begun["status"] == "completed" and not begun["request_counts"]["failed"]
    return exit_codes.DONE if is_whole else exit_codes.FAILED


def _progress(begun: dict[str, Any]) -> LoadProgress:
    counts = begun["request_counts"]
    done, total = counts["completed"] + counts["failed"], counts["total"]
    failed = f", {counts['failed']} of them failed" if counts["failed"] else ""
    detail = f"({done:,} of {total:,} lines{failed})"
    share = done / total if total else None
    return LoadProgress(begun["status"], share, detail, model=begun["id"])


def _place(fault: dict[str, Any]) -> str:
    return f"{fault['param']}: " if fault["param"] else ""


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that gets its final name when it is complete."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _trouble(reason: str, pause_s: float) -> None:
    say(f"headrace: {reason}; the batch continues when the server is back.")
