"""`headrace batch FILE`: a file of requests, answered by a server from what others leave."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from headrace.cli import exits
from headrace_common.errors import ConfigError

if TYPE_CHECKING:
    from headrace.client.batches import BatchClient

_MAX_TOLD = 10


@click.command(short_help="Answer a file of requests, from what others leave.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-O", "--output", type=click.Path(path_type=Path),
    help="File for the results  [default: FILE with .results before its suffix]",
)  # fmt: skip
@click.option("--hours", type=click.IntRange(1, 720), default=24, show_default=True,
              help="Hours after which what is left is given up")  # fmt: skip
@click.option("--again", is_flag=True, help="Begin anew, even if this file was sent before")
@click.option("--cancel", is_flag=True, help="Answer no further lines of this file")
@click.option("--url", envvar="HEADRACE_URL", help="Server  [default: port 8000 here]")
@click.option("--api-key", envvar="HEADRACE_API_KEY", help="Key of that server")
def batch(
    file: Path, output: Path | None, hours: int, again: bool, cancel: bool, **server: Any
) -> None:
    """Have every line of FILE answered, and write the results once all are there. A line is
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; all have one
    url. Lines take only what other requests leave. Ctrl-C leaves the batch at work on the server;
    the same command goes on where it stands. Exit code 1 if a line failed.

    \b
    headrace batch requests.jsonl
    headrace batch requests.jsonl --output answers.jsonl --hours 72
    headrace batch requests.jsonl --cancel
    """
    from headrace.client.batches import BatchClient, digest_of
    from headrace.client.http import URL

    key = server["api_key"] or os.environ.get("HEADRACE_API_KEYS", "").split(",")[0] or None
    output = output or file.with_suffix(f".results{file.suffix}")
    if not cancel:
        check_output(output)
    digest = digest_of(file)
    with BatchClient(server["url"] or URL, key, _trouble) as client:
        begun = None if again else client.begun(digest)
        if cancel:
            sys.exit(_cancel(client, begun))
        if begun is not None:
            _say(f"{begun['id']} was begun before; --again begins anew.")
        sys.exit(_follow(client, begun or client.begin(file, digest, hours), output))


def check_output(path: Path) -> None:
    """ConfigError, before a line is answered, if the results could not be written."""
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; give a file.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        why = "may not be written to" if path.parent.exists() else "is not there"
        raise ConfigError(f"--output: the folder {path.parent} {why}; make it, or give another.")


def _cancel(client: "BatchClient", begun: dict[str, Any] | None) -> int:
    if begun is None:
        _say("headrace: no batch of this file is at work.")
        return exits.FAILED
    client.cancel(begun)
    _say(f"{begun['id']}: no further lines are answered.")
    return exits.DONE


def _follow(client: "BatchClient", first: dict[str, Any], output: Path) -> int:
    begun, told = first, ""
    try:
        for begun in client.follow(first):
            if (line := _progress(begun)) != told:
                told = line
                _say(line)
    except KeyboardInterrupt:
        _say(f"{begun['id']} goes on; the same command shows how it stands.")
        return exits.INTERRUPTED
    for fault in ((begun["errors"] or {}).get("data") or ())[:_MAX_TOLD]:
        _say(f"headrace: line {fault['line']}: {_place(fault)}{fault['message']}")
    if begun["status"] == "failed":
        return exits.FAILED
    with _written(output) as file:
        for id in (begun["output_file_id"], begun["error_file_id"]):
            for piece in client.results(id):
                file.write(piece)
    _say(f"{output}: {begun['request_counts']['total']} results, in the order in which they came.")
    is_whole = begun["status"] == "completed" and not begun["request_counts"]["failed"]
    return exits.DONE if is_whole else exits.FAILED


def _progress(begun: dict[str, Any]) -> str:
    counts = begun["request_counts"]
    done = counts["completed"] + counts["failed"]
    failed = f", {counts['failed']} of them failed" if counts["failed"] else ""
    return f"{begun['id']}: {begun['status']}, {done} of {counts['total']} lines{failed}"


def _place(fault: dict[str, Any]) -> str:
    return f"{fault['param']}: " if fault["param"] else ""


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A file that is there once all of it is."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _trouble(reason: str, pause_s: float) -> None:
    _say(f"headrace: {reason}; the batch goes on there once it is back.")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
