"""Defines the options of commands that talk to a running server."""

import os

import click
from click.core import ParameterSource

WRONG_KEY = (
    "The server does not accept this API key; set the right one with HEADRACE_API_KEY or --api-key."
)
_PORT = "headrace.port"


def server_options() -> list[click.Parameter]:
    """Return the options for the address of the server and for its key."""
    return [
        click.Option(
            ["--url"],
            metavar="URL",
            envvar="HEADRACE_URL",
            callback=_address,
            help="URL of the server  [default: http://127.0.0.1:8000]",
        ),
        # An eager option is read before the others, so `_address` knows the port.
        click.Option(
            ["--port"],
            type=click.IntRange(1, 65535),
            metavar="PORT",
            is_eager=True,
            expose_value=False,
            callback=_keep_port,
            help="Port of a server on this machine; short for --url http://127.0.0.1:PORT",
        ),
        click.Option(
            ["--api-key"],
            metavar="KEY",
            envvar="HEADRACE_API_KEY",
            help="API key; other users of this machine can see it in the process list, so prefer "
            "HEADRACE_API_KEY  [default: first of HEADRACE_API_KEYS]",
        ),
    ]


def _keep_port(context: click.Context, option: click.Parameter, port: int | None) -> None:
    context.meta[_PORT] = port


def _address(context: click.Context, option: click.Parameter, url: str | None) -> str | None:
    """Return the URL of the server. --port takes precedence over HEADRACE_URL."""
    if (port := context.meta[_PORT]) is None:
        return url
    if context.get_parameter_source("url") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--port and --url both name the server; give only one of the two.")
    return f"http://127.0.0.1:{port}"


def key_or_first(given: str | None) -> str:
    """Return the key to send: the given key, or else the first of HEADRACE_API_KEYS, or ""."""
    return given or os.environ.get("HEADRACE_API_KEYS", "").split(",")[0]
