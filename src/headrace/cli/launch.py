"""`headrace launch`: starts a coding agent that uses a Headrace server."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.cli.launch_clients import CLIENTS, KEY, LaunchClient, Model, Setup
from headrace.cli.logs import printable, say
from headrace.cli.models import ask
from headrace.cli.private_server import ServerEnded, end_on_hangup, private_server
from headrace.cli.server_options import key_or_first, server_options
from headrace_common.checkpoints.find import find_here
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.sources import load
from headrace_common.errors import ConfigError, HeadraceError

# Some agents replace references such as {file:PATH} and $NAME in their configuration, so only
# names of models without such references are accepted.
_NAME = re.compile(r"\w[\w .:/@+=,()-]*")
_KINDS = (None, "text", "image-text", "seq2seq")  # None if the model is not loaded
_WITHOUT_TOOLS = re.compile(r"headrace-mini|smollm2", re.IGNORECASE)
# If less than this share of the context is left for the conversation, launch warns.
_MIN_ROOM = 0.25
# An agent that was asked to end gets this many seconds before it is killed.
_PATIENCE_S = 10.0
_NO_KEY = "unused"
_END = "END_OF_FILE"


class _Architecture(msgspec.Struct):
    input_modalities: tuple[str, ...] = ()


class _Meta(msgspec.Struct):
    n_ctx_train: int | None = None


class _ListedModel(msgspec.Struct):
    id: str
    root: str | None = None
    kind: str | None = None
    context_length: int | None = None
    architecture: _Architecture = msgspec.field(default_factory=_Architecture)
    meta: _Meta | None = None
    status: dict[str, Any] = {}


class _Listing(msgspec.Struct):
    data: tuple[_ListedModel, ...]
    models: tuple[Any, ...] = ()


class _LaunchCommand(click.Command):
    """A command that passes its arguments after `--` on to the agent."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


@click.command(
    "launch",
    cls=_LaunchCommand,
    short_help="Start a coding agent on a model.",
    params=server_options(),
)
@click.argument("client", type=click.Choice(list(CLIENTS)), required=False)
@click.argument("model", required=False)
@click.option("--print", "prints", is_flag=True, help="Print the commands instead of running them")
@click.pass_context
def launch(
    context: click.Context,
    client: str | None,
    model: str | None,
    url: str | None,
    api_key: str | None,
    prints: bool,
) -> None:
    """Start a coding agent that uses MODEL; if you name no agent, list the agents.

    A running server that has MODEL is used. Otherwise a server for MODEL starts, and ends with the
    agent. Without MODEL, the agent gets the running server's model, or else the model that
    `headrace serve` would serve. The agent's own configuration and logins are not changed.

    \b
    headrace launch claude
    headrace launch opencode qwen3-coder-30b-a3b
    headrace launch codex --port 9000 -- exec "Fix the failing test."
    headrace launch pi --print
    """
    if client is None:
        _list_clients()
        return
    agent, key = CLIENTS[client], key_or_first(api_key)
    found = _running(url, key, model)
    if found is not None and not prints:
        # This comes first, so that nobody installs an agent that cannot run.
        refuse_short_context(agent, found)
    program = shutil.which(client)
    if program is None and not prints:
        raise HeadraceError(
            f"{agent.title} is not installed; install it with `{agent.install_command}`."
        )
    if prints:
        if found is None:
            raise HeadraceError(
                "--print needs a running server that has the model; start one with "
                f"`headrace serve {shlex.quote(model or 'MODEL')}`."
            )
        warn(agent, found)
        click.echo(as_script(client, agent.setup(found, _folder()), context.obj, bool(key)))
        return
    end_on_hangup()
    if found is None:
        model = model or _model_of_serve()
        refuse_short_files(agent, model)
    try:
        with _served(found, key, model) as used, _private_folder() as folder:
            _prepare(agent, used)
            setup = agent.setup(used, folder)
            for file, content in setup.files.items():
                file.write_text(content)
            variables = {**os.environ, **setup.variables, KEY: key or _NO_KEY}
            code = _run([program or client, *setup.flags, *context.obj], variables)
    except ServerEnded as ended:
        code = ended.code
    sys.exit(code)


def _list_clients() -> None:
    for name, client in CLIENTS.items():
        place = shutil.which(name) or f"not installed: {client.install_command}"
        click.echo(f"{name:<10}{client.title:<13}{place}")


def _running(url: str | None, key: str, name: str | None) -> Model | None:
    """Return a model of the running server.

    Without `url`, returns None if no server answers or the server lacks the named model.
    """
    from headrace.client.errors import Unreachable
    from headrace.client.http import URL, to_address

    address = to_address(url or URL)
    try:
        return choose(ask(address, key), address, name)
    except HeadraceError as error:
        if url is None and (name or isinstance(error, Unreachable)):
            return None
        raise


def choose(body: bytes, address: str, name: str | None) -> Model:
    """Choose the named model from a server's list, or without a name a model that can chat.

    Models in memory take precedence. Raises HeadraceError if there is none.
    """
    try:
        listing = msgspec.json.decode(body, type=_Listing)
    except msgspec.MsgspecError:
        raise HeadraceError(f"{address} sent no list of models in Headrace's format.") from None
    known = [it for it in listing.data if it.kind in _KINDS and _NAME.fullmatch(it.id)]
    fitting = [it for it in known if name in (None, it.id)]
    if not fitting:
        names = ", ".join(it.id for it in known)
        what = f"has no model {printable(name)}" if name else "has no model that can chat"
        raise HeadraceError(f"The server at {address} {what}; it has: {names or 'none'}.")
    entry = next((it for it in fitting if it.status.get("value") == "loaded"), fitting[0])
    modalities = tuple(it for it in entry.architecture.input_modalities if it == "image")
    return Model(
        address,
        entry.id,
        entry.context_length,
        ("text", *modalities),
        listing.models,
        entry.meta.n_ctx_train if entry.meta else None,
    )


def refuse_short_context(client: LaunchClient, model: Model) -> None:
    """Raise HeadraceError if the model's context is shorter than the agent's first prompt."""
    if model.context and model.context < client.num_tokens:
        pi = CLIENTS["pi"]
        raise HeadraceError(
            f"{_needs(client, model)}. {_remedy(model).capitalize()}, or use `headrace launch pi`, "
            f"which sends {pi.num_tokens:,}. To start it anyway, use the lines that --print shows."
        )


def refuse_short_files(client: LaunchClient, name: str) -> None:
    """Refuse a model on this machine before it is loaded, for the same reason."""
    settings = load({"model": name}, os.environ, None).models[0]
    if (folder := find_here(name, settings.revision, settings.mmproj)) is None:
        return
    longest = read_spec(folder).max_positions
    served = min(filter(None, (longest, settings.max_model_len)), default=None)
    refuse_short_context(client, Model("", name, served, longest_context=longest))


def _needs(client: LaunchClient, model: Model) -> str:
    return (
        f"{client.title} sends {client.num_tokens:,} tokens before your first word, and "
        f"{model.name} takes {model.context:,}"
    )


def _remedy(model: Model) -> str:
    if model.can_grow:
        return "use a model with a longer context, or raise --max-model-len"
    return "use a model with a longer context, such as qwen3-4b"


def warn(client: LaunchClient, model: Model) -> bool:
    """Warn about a small model, and about little room. Returns whether there is little room."""
    if _WITHOUT_TOOLS.search(model.name):
        say(f"headrace: {model.name} is too small for an agent's tasks; use it for tests only.")
    if not model.context:
        return False
    room = model.context - client.num_tokens
    if room >= max(client.num_free_tokens, model.context * _MIN_ROOM):
        return False
    left = f"so only {room:,} are left" if room > 0 else "which is too short"
    say(f"headrace: {_needs(client, model)}, {left}; {_remedy(model)}.")
    return True


def _prepare(client: LaunchClient, model: Model) -> None:
    """Warn, and let a person read the warning before the agent clears the terminal."""
    refuse_short_context(client, model)
    if warn(client, model) and sys.stdin.isatty() and sys.stderr.isatty():
        click.prompt(
            "headrace: press Enter to start", default="", show_default=False,
            prompt_suffix=" ", err=True,
        )  # fmt: skip


@contextlib.contextmanager
def _served(found: Model | None, key: str, name: str | None) -> Iterator[Model]:
    """Yield the model that was found, or one of a private server."""
    if found is not None:
        yield found
        return
    assert name is not None, "without a server, launch names the model"
    with private_server(name) as address:
        yield choose(ask(address, key), address, None)


def _model_of_serve() -> str:
    from headrace.cli.default_model import with_best_model

    return with_best_model(load({}, os.environ, None)).models[0].model


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / "launch"


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, and remove it at the end."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=_folder())
    except OSError as error:
        raise ConfigError(
            f"Cannot write to {_folder()} ({error.strerror}); set XDG_CACHE_HOME to a writable "
            "folder."
        ) from None
    with folder as path:
        yield Path(path)


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run the agent and pass signals on to it. Return its exit code.

    An agent that ignores SIGTERM or SIGHUP is killed.
    """
    agents: list[subprocess.Popen[bytes]] = []
    early: list[int] = []
    deadline = float("inf")

    def pass_on(number: int, _: object) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        if not agents:
            early.append(number)
        for agent in agents:
            agent.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    # The terminal also sends Ctrl-C to the agent, which decides what to do.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        agents.append(subprocess.Popen(command, env=variables))
    except OSError as error:
        raise HeadraceError(f"{command[0]} cannot be run: {error.strerror}.") from None
    for signal_number in early:
        agents[0].send_signal(signal_number)
    code = None
    while code is None:
        # A signal that another thread receives does not interrupt a wait, so waits must be short.
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = agents[0].wait(0.5)
        if code is None and time.monotonic() > deadline:
            agents[0].kill()
    return 128 - code if code < 0 else code


def as_script(program: str, setup: Setup, arguments: Sequence[str], has_key: bool) -> str:
    """Return a shell script, without the key, that writes the files and starts the agent."""
    key = '"${HEADRACE_API_KEY:?set it to your key}"' if has_key else _NO_KEY
    lines = [f"export {KEY}={key}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    for file, content in setup.files.items():
        lines.append(f"mkdir -p -m 700 {shlex.quote(str(file.parent))}")
        lines += [f"cat > {shlex.quote(str(file))} <<'{_END}'", content.rstrip("\n"), _END]
    return "\n".join([*lines, shlex.join([program, *setup.flags, *arguments])])
