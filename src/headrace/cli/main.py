"""The `headrace` command: subcommands, flags, exit codes.

Each subcommand imports its heavy modules only when it runs.
"""

import errno
import functools
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.cli import exit_codes
from headrace.cli.about import completion, show_help, version
from headrace.cli.batch import batch
from headrace.cli.bench import bench
from headrace.cli.cache import cache
from headrace.cli.help import SectionedGroup, SettingOption, SettingsCommand
from headrace.cli.launch import launch
from headrace.cli.load_lines import LoadLines
from headrace.cli.logs import printable, set_up
from headrace.cli.merge import merge
from headrace.cli.models import downloaded, models, ps, pull, rm, stop
from headrace.cli.server_options import key_or_first, server_options
from headrace.cli.stdio import make_usable
from headrace_common.config.settings import ServerConfig
from headrace_common.config.sources import PREFIX, load_with_origins, nearest, settings
from headrace_common.errors import ConfigError, HeadraceError, ModelError, RequestFailed
from headrace_common.loading import STARTING
from headrace_common.system.panics import STEERING
from headrace_common.version import __version__
from headrace_common.without_engine import WITHOUT_ENGINE, is_missing_engine

_FIELD = click.Option(
    ["-o", "pairs"],
    multiple=True,
    metavar="FIELD=VALUE",
    help="Field of the request, such as temperature=0.2; may be repeated",
)
_SYSTEM = click.Option(["--system"], metavar="TEXT", help="System message of a new conversation")
_UNIX_MODULES = ("fcntl", "resource")  # missing on Windows
# Every subcommand reads this variable, but only some subcommands have the flag --log-level.
_DEBUG = f"{PREFIX}LOG_LEVEL"
_SECTIONS = {
    "Serve and chat": ("serve", "run", "chat", "launch", "ps", "stop"),
    "Models": ("ls", "pull", "rm", "models", "merge"),
    "Generate and embed": ("generate", "embed", "batch"),
    "Measure and check": ("doctor", "config", "bench", "cache"),
    "This command": ("help", "version", "completion"),
}
# Errors of the disk, or of a file's permissions.
_NOT_BUGS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
_WRONG_FIELD = ("invalid_type", "invalid_value", "unsupported_parameter")


def _options(*parts: str) -> list[click.Parameter]:
    """Return the flags for these parts of the configuration, or for all settings but the model."""
    return [
        SettingOption(setting)
        for setting in settings()
        if setting.name != "model" and (not parts or setting.path[0] in parts)
    ]


def _config_with_origins(
    model: str | None, flags: dict[str, Any], file: Path | None
) -> tuple[ServerConfig, tuple[dict[str, str], ...]]:
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    given |= {} if model is None else {"model": model}
    warn = functools.partial(print, "headrace:", file=sys.stderr)
    return load_with_origins(given, os.environ, file, warn)


def _config(model: str | None, flags: dict[str, Any], file: Path | None = None) -> ServerConfig:
    config, _ = _config_with_origins(model, flags, file)
    if config.log_level == "debug":
        logging.basicConfig(level=logging.DEBUG)
    return config


def read_fields(pairs: Iterable[str], known: Iterable[str]) -> dict[str, Any]:
    """Parse request fields such as `-o temperature=0.2 -o stop=END`.

    A value that is not valid JSON is read as text. Raises ConfigError for an unknown name.
    """
    names = set(known)
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise ConfigError(f"-o takes field=value, such as temperature=0.2; {pair!r} has no =.")
        if name not in names:
            raise ConfigError(f"-o: unknown field {name}{nearest(name, names)}")
        fields[name] = _value(text)
    return fields


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _several() -> list[click.Parameter]:
    """Return the flags that name several models."""
    file = click.Path(dir_okay=False, path_type=Path)
    named = click.Option(
        ["--model", "models_at"],
        multiple=True,
        metavar="NAME=PATH",
        help="One of several models, loaded on demand; PATH may be a hub id",
    )
    with_tables = click.Option(
        ["--config", "config_file"], type=file, help="TOML file with [serve] and [[models]]"
    )
    return [named, with_tables]


def _starting() -> LoadLines:
    """Show a line immediately, because the imports take seconds."""
    return LoadLines(STARTING)


def _command(
    name: str, run: Callable[..., None], params: list[click.Parameter], short_help: str
) -> click.Command:
    """Make a subcommand whose help text is the docstring of `run`."""
    has_settings = any(isinstance(param, SettingOption) for param in params)
    kind = SettingsCommand if has_settings else click.Command
    return kind(name, callback=run, params=params, help=run.__doc__, short_help=short_help)


def _serve_command() -> click.Command:
    def run(model: str | None, config_file: Path | None, **flags: Any) -> None:
        """Serve MODEL: a folder, a GGUF file, a hub id, or a name of `headrace models available`.

        A model that is not on this machine is downloaded first. Without MODEL, the largest
        downloaded chat model that fits into three quarters of the memory is served. If there is
        none, or if stderr is not a terminal, the test model headrace-mini is served.

        \b
        headrace serve
        headrace serve smollm2
        headrace serve Qwen/Qwen3-0.6B
        headrace serve ./my-model --max-num-seqs 8 --port 9000
        headrace serve --model small=./one --model large=./two --max-models 1
        """
        config = _config(model, flags, config_file)
        set_up(config)
        with _starting() as lines:
            from headrace.cli.serve import serve

            code = serve(config, lines, chooses=model is None and config_file is None)
        # Without this call, the interpreter would search all modules for garbage before it exits.
        gc.freeze()
        sys.exit(code)

    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        *_several(),
        *_options(),
    ]
    return _command("serve", run, params, "Start a server.")


def _generate_command() -> click.Command:
    def run(
        words: tuple[str, ...],
        pairs: tuple[str, ...],
        schema: str | None,
        as_json: bool,
        **flags: Any,
    ) -> None:
        """Complete PROMPT without a server and print the text.

        Without PROMPT, or with -, the prompt is read from stdin. If there are two words, the first
        is the model. A single word is the prompt, unless it names a model: headrace-mini, a name of
        `headrace models available`, a folder, a GGUF file, or a hub id that was downloaded. A path
        that does not exist is an error. If a limit cuts the text off, a note on stderr says so, and
        the exit code is 1 if the text had to follow a schema or a grammar.

        \b
        headrace generate "The days of the week are Monday, Tuesday,"
        headrace generate ./my-model "Once upon a time" -o max_tokens=50 --json
        cat story.txt | headrace generate -
        headrace generate "A point: " --schema point.json
        """
        with _starting():
            from headrace.cli import generate as verb
            from headrace.protocols.fields.common import known_fields
            from headrace.protocols.openai.completions import TABLE

        model, given = verb.split_words(words)
        fields = read_fields(pairs, known_fields(TABLE) - {"prompt", "stream"})
        if schema is not None:
            fields["json_schema"] = verb.read_schema(schema)
        config, prompt = _config(model, flags), verb.read_prompt(given)
        if model is None:
            verb.say_model(config)
        sys.exit(verb.generate(config, prompt, verb.check_fields(fields, prompt), as_json))

    params: list[click.Parameter] = [
        click.Argument(["words"], nargs=-1, metavar="[MODEL] [PROMPT|-]"),
        _FIELD,
        click.Option(
            ["--schema"], metavar="FILE", help="File with a JSON Schema that the text must follow"
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the whole answer as JSON"),
        *_options("models", "alias", "log_level"),
    ]
    return _command("generate", run, params, "Continue a prompt and print the text.")


def _embed_command() -> click.Command:
    def run(words: tuple[str, ...], pairs: tuple[str, ...], **flags: Any) -> None:
        """Embed each TEXT without a server and print one JSON array per line.

        Without TEXT, or with -, each line of stdin is a text. If there are several words, the first
        is the model unless it contains spaces. A single word is a text, unless it names a model:
        headrace-mini, a name of `headrace models available`, a folder, a GGUF file, or a hub id
        that was downloaded. A path that does not exist is an error.

        \b
        headrace embed ./my-model "A wheel that turns" "A river"
        cat lines.txt | headrace embed ./my-model - -o dimensions=256
        """
        with _starting():
            from headrace.cli.generate import embed, read_inputs, split_inputs
            from headrace.protocols.vectors.embeddings import TABLE

        model, texts = split_inputs(words)
        fields = read_fields(pairs, set(TABLE) - {"input", "encoding_format"})
        embed(_config(model, flags), read_inputs(texts), fields)

    params: list[click.Parameter] = [
        click.Argument(["words"], nargs=-1, metavar="[MODEL] [TEXT|-]..."),
        _FIELD,
        *_options("models", "alias", "log_level"),
    ]
    return _command("embed", run, params, "Print the embeddings of texts.")


def _chat_command() -> click.Command:
    def run(
        model: str | None,
        pairs: tuple[str, ...],
        lists: bool,
        deleted: tuple[str, ...],
        **given: Any,
    ) -> None:
        """Chat with a running server, or start a server for MODEL that ends with the chat.

        Enter sends a message; Alt-Enter, or a backslash before Enter, starts a new line. Pasted
        text and piped input are one message each. Ctrl-C stops an answer; Ctrl-D leaves. /help
        lists more commands, for example to attach files. Conversations are stored on this machine.

        \b
        headrace chat
        headrace chat ./my-model --system "Answer in one sentence."
        headrace chat --list
        headrace chat --resume 3
        headrace chat --delete 3
        echo "Count to 20." | headrace chat headrace-mini -o temperature=0
        """
        from headrace.cli import chat_command

        if deleted:
            chat_command.delete_conversations(deleted)
        if lists:
            chat_command.list_conversations()
        if not (deleted or lists):
            sys.exit(chat_command.run_chat(model, _chat_fields(pairs), **given))

    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        *server_options(),
        _SYSTEM,
        click.Option(
            ["--continue", "goes_on"], is_flag=True, help="Continue the last conversation"
        ),
        click.Option(
            ["--resume", "number"],
            type=int,
            metavar="NUMBER",
            help="Continue the conversation with this number",
        ),
        click.Option(["--list", "lists"], is_flag=True, help="List the stored conversations"),
        click.Option(
            ["--delete", "deleted"],
            multiple=True,
            metavar="NUMBER|all",
            help="Delete the stored conversation with this number, or all; may be repeated",
        ),
        _FIELD,
    ]
    return _command("chat", run, params, "Chat in the terminal.")


def _chat_fields(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse and check the fields of a chat's requests, before a model is loaded."""
    from headrace.protocols.fields.common import known_fields
    from headrace.protocols.openai.chat import TABLE, read

    fields = read_fields(pairs, known_fields(TABLE) - {"messages", "stream"})
    read(fields | {"messages": [{"role": "user", "content": ""}]})
    return fields


def _run_command() -> click.Command:
    def run(
        model: str,
        words: tuple[str, ...],
        pairs: tuple[str, ...],
        url: str | None,
        api_key: str | None,
        system: str | None,
    ) -> None:
        """Chat with MODEL, or only print its answer to PROMPT.

        If the server at the default URL has the model, that server answers. Otherwise a server for
        MODEL starts, and ends with the chat. `headrace chat --help` explains the keys.

        \b
        headrace run smollm2
        headrace run headrace-mini "Count from 1 to 20."
        """
        from headrace.cli.chat_command import run_chat
        from headrace.cli.models import is_served

        fields, key = _chat_fields(pairs), key_or_first(api_key)
        is_there = url is not None or is_served(model, key)
        if is_there:
            fields["model"] = model
        talk: dict[str, Any] = {"system": system, "goes_on": False, "number": None}
        own = None if is_there else model
        sys.exit(run_chat(own, fields, url, key, " ".join(words), **talk))

    params: list[click.Parameter] = [
        click.Argument(["model"]),
        click.Argument(["words"], nargs=-1, metavar="[PROMPT]"),
        *server_options(),
        _SYSTEM,
        _FIELD,
    ]
    return _command("run", run, params, "Chat with a model; starts a server if none has it.")


def _doctor_command() -> click.Command:
    def run(
        model: str | None,
        as_json: bool,
        loads: bool,
        loss: Path | None,
        config_file: Path | None,
        **flags: Any,
    ) -> None:
        """Check whether this machine can serve and, with MODEL, how the model would run.

        Changes nothing and takes seconds. With --load, the model is loaded, its kernels are
        compiled and checked, and its cache is measured. The exit code is 1 if something is broken.

        \b
        headrace doctor
        headrace doctor ./my-model --json
        headrace doctor ./my-model --load
        headrace doctor ./my-model --loss text.txt
        """
        with _starting():
            from headrace.cli.doctor import doctor

        if loss is not None and model is None and config_file is None:
            raise click.UsageError("--loss needs a MODEL.")
        sys.exit(doctor(_config(model, flags, config_file), model, as_json, loss, loads))

    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the findings as JSON"),
        click.Option(["--load", "loads"], is_flag=True, help="Load the model and measure it"),
        click.Option(
            ["--loss"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Measure with this text how much precision int8 and int4 weights lose",
        ),
        *_several(),
        *_options(),
    ]
    return _command("doctor", run, params, "Check this machine, and how a model would run on it.")


def _config_command() -> click.Command:
    def run(
        model: str | None, as_json: bool, shows_all: bool, config_file: Path | None, **flags: Any
    ) -> None:
        """Print the settings that `headrace serve` would use, and where each comes from.

        Takes the arguments of `headrace serve`. Only settings that differ from their defaults are
        listed. Keys and passwords are hidden.

        \b
        headrace config
        headrace config --max-num-seqs 8 --json
        headrace config --config headrace.toml --all
        """
        from headrace.cli.config import effective, show_config

        config, origins = _config_with_origins(model, flags, config_file)
        if model is not None:
            origins[0]["model"] = "MODEL"
        show_config(list(effective(config, origins, shows_all)), as_json)

    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        click.Option(["--all", "shows_all"], is_flag=True, help="Also list unchanged settings"),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the settings as JSON"),
        *_several(),
        *_options(),
    ]
    return _command("config", run, params, "Print the effective settings and their origins.")


@click.group(cls=SectionedGroup, sections=_SECTIONS)
@click.version_option(__version__)
def cli() -> None:
    """An LLM inference server whose streams are never silent, never stalled, never lost.

    To begin, run `headrace serve smollm2`. It downloads a small chat model (93 MB) and shows the
    address of a chat page. `headrace models available` lists larger models.
    """


for command in (
    _serve_command(),
    _run_command(),
    _chat_command(),
    launch,
    ps,
    stop,
    _generate_command(),
    _embed_command(),
    _doctor_command(),
    _config_command(),
    models,
    pull,
    merge,
    cache,
    batch,
    bench,
    rm,
    show_help,
    version,
    completion,
):
    cli.add_command(command)
cli.add_command(downloaded, "ls")
cli.add_command(copy(downloaded), "list")
cli.commands["list"].hidden = True


def main() -> None:
    """Run the command. A failure becomes one line on stderr and an exit code."""
    make_usable()
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(exit_codes.INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(exit_codes.CONFIG)
    # The program that reads the output has ended.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exit_codes.FAILED)
    except STEERING:
        raise
    # A panic in a Rust library is not an Exception.
    except BaseException as error:
        code, message = _explain(error)
        print(f"headrace: {message}", file=sys.stderr, flush=True)
        if os.environ.get(_DEBUG) == "debug" or logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exception(error)
        sys.exit(code)


def _explain(error: BaseException) -> tuple[int, str]:
    match error:
        case click.ClickException():
            return exit_codes.CONFIG, error.format_message()
        case ConfigError():
            return exit_codes.CONFIG, str(error)
        case ModuleNotFoundError() if error.name in _UNIX_MODULES:
            return (
                exit_codes.FAILED,
                "This command needs Linux or macOS; on Windows, run it in WSL.",
            )
        case ModuleNotFoundError() if is_missing_engine(error):
            return exit_codes.CONFIG, WITHOUT_ENGINE
        case ModelError():
            return exit_codes.MODEL, str(error)
        case RequestFailed() if error.code in _WRONG_FIELD:
            return exit_codes.CONFIG, str(error)
        case HeadraceError():
            return exit_codes.FAILED, str(error)
        case OSError() if error.errno in _NOT_BUGS:
            place = f"{printable(str(error.filename))}: " if error.filename else ""
            return exit_codes.FAILED, f"{place}{error.strerror}."
    name = type(error).__name__
    return exit_codes.FAILED, (
        f"failed because of a bug: {name}: {error}. Run the command again with "
        f"{_DEBUG}=debug to see where the bug is."
    )
