"""The `headrace` command: verbs, flags, exit codes. Heavy imports wait for their verb."""

import logging
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.cli import exits
from headrace.cli.batch import batch
from headrace.cli.bench import bench
from headrace.cli.cache import cache
from headrace.cli.load_lines import LoadLines
from headrace.cli.logs import set_up
from headrace.cli.merge import merge
from headrace.cli.models import models, pull
from headrace.cli.stdio import make_usable
from headrace_common.config.settings import ServerConfig
from headrace_common.config.sources import PREFIX, WITHOUT_VALUE, Setting, load, nearest, settings
from headrace_common.errors import ConfigError, HeadraceError, ModelError, RequestFailed
from headrace_common.loading import STARTING
from headrace_common.system.panics import STEERING
from headrace_common.version import __version__
from headrace_common.without_engine import WITHOUT_ENGINE, is_missing_engine

_FIELD = click.Option(["-o", "pairs"], multiple=True, metavar="FIELD=VALUE", help="Request field")
_OF_UNIX = ("fcntl", "resource")  # modules that Python has on no other system
# Every verb reads this variable; only a few have the flag --log-level.
_DEBUG = f"{PREFIX}LOG_LEVEL"
_WRONG_FIELD = ("invalid_type", "invalid_value", "unsupported_parameter")


def _option(setting: Setting) -> click.Option:
    kind: Any = click.Choice(setting.choices) if setting.choices else str
    alone = WITHOUT_VALUE.get(setting.name)
    more: dict[str, Any] = {} if alone is None else {"flag_value": alone}
    shown = setting.default if setting.default not in (None, (), False) else None
    return click.Option(
        [*setting.flags, setting.name],
        type=bool if setting.type is bool else kind,
        is_flag=setting.type is bool,
        **more,
        multiple=setting.is_list,
        default=None,
        help=setting.description + (f"  [default: {shown}]" if shown is not None else ""),
    )


def _options(*parts: str) -> list[click.Parameter]:
    """All settings but the model, or those of some parts of the configuration."""
    return [
        _option(setting)
        for setting in settings()
        if setting.name != "model" and (not parts or setting.path[0] in parts)
    ]


def _config(model: str | None, flags: dict[str, Any], file: Path | None = None) -> ServerConfig:
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    given |= {} if model is None else {"model": model}
    config = load(given, os.environ, file, lambda line: print(f"headrace: {line}", file=sys.stderr))
    if config.log_level == "debug":
        logging.basicConfig(level=logging.DEBUG)
    return config


def read_fields(pairs: Iterable[str], known: Iterable[str]) -> dict[str, Any]:
    """Fields of a request from `-o temperature=0.2 -o stop=END`.

    Values are JSON where they are valid JSON, else text; ConfigError for an unknown name.
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
    """The ways to name several models."""
    file = click.Path(dir_okay=False, path_type=Path)
    named = click.Option(
        ["--model", "models_at"],
        multiple=True,
        metavar="NAME=PATH",
        help="One of several models, loaded when it is asked for; PATH may be a hub id",
    )
    with_tables = click.Option(
        ["--config", "config_file"], type=file, help="TOML file with [serve] and [[models]]"
    )
    return [named, with_tables]


def _starting() -> LoadLines:
    """Shows that something happens while much is imported."""
    return LoadLines(STARTING)


def _serve_command() -> click.Command:
    def run(model: str | None, config_file: Path | None, **flags: Any) -> None:
        """Serve MODEL: a folder, a GGUF file, a hub id, smollm2, or headrace-mini (the default).

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

            code = serve(config, lines)
        sys.exit(code)

    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        *_several(),
        *_options(),
    ]
    return click.Command("serve", callback=run, params=params, help=run.__doc__)


def _generate_command() -> click.Command:
    def run(
        words: tuple[str, ...],
        pairs: tuple[str, ...],
        schema: str | None,
        as_json: bool,
        **flags: Any,
    ) -> None:
        """Continue PROMPT in this process and print the text. Without PROMPT, or with -, the
        prompt is read from stdin. The first of two words is the model. A single word is the prompt,
        unless it names a model on this machine: headrace-mini, smollm2, a folder, a GGUF file, or a
        hub id that was downloaded. A path that does not exist is an error. If the text
        ends at a limit, stderr says so; if it had to follow a schema or a grammar, the exit code is
        then 1.

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
        sys.exit(verb.generate(config, prompt, verb.check_fields(fields, prompt), as_json))

    params: list[click.Parameter] = [
        click.Argument(["words"], nargs=-1, metavar="[MODEL] [PROMPT|-]"),
        _FIELD,
        click.Option(["--schema"], metavar="FILE", help="JSON Schema that the text must follow"),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the whole answer as JSON"),
        *_options("models", "alias", "log_level"),
    ]
    return click.Command("generate", callback=run, params=params, help=run.__doc__)


def _embed_command() -> click.Command:
    def run(words: tuple[str, ...], pairs: tuple[str, ...], **flags: Any) -> None:
        """Print the embedding of each TEXT, a JSON array on a line of its own, computed in this
        process. Without TEXT, or with -, each line of stdin is a text. The first of several words
        is the model, unless it contains spaces. A single word is a text, unless it names a model on
        this machine: headrace-mini, smollm2, a folder, a GGUF file, or a hub id that was
        downloaded. A path that does not exist is an error.

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
    return click.Command("embed", callback=run, params=params, help=run.__doc__)


def _chat_command() -> click.Command:
    def run(model: str | None, pairs: tuple[str, ...], **given: Any) -> None:
        """Talk to a server; with MODEL, to one of its own, which ends with the chat. Alt-Enter, or
        a backslash before Enter, begins a new line; a pasted text is one message. Ctrl-C stops an
        answer, once more (or Ctrl-D) leaves. What is piped in is one message. /help lists what else
        there is: files that go along, and the conversations that are kept.

        \b
        headrace chat
        headrace chat ./my-model --system "Answer in one sentence."
        headrace chat --list
        headrace chat --resume 3
        echo "Count to 20." | headrace chat headrace-mini -o temperature=0
        """
        from headrace.cli.chat_command import run_chat
        from headrace.protocols.fields.common import known_fields
        from headrace.protocols.openai.chat import TABLE, read

        known = known_fields(TABLE) - {"messages", "stream"}
        fields = read_fields(pairs, known)
        read(fields | {"messages": [{"role": "user", "content": ""}]})  # before a model is loaded
        sys.exit(run_chat(model, fields, **given))

    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        click.Option(["--url"], envvar="HEADRACE_URL", help="Server  [default: port 8000 here]"),
        click.Option(
            ["--api-key"],
            envvar="HEADRACE_API_KEY",
            help="Key of that server; others here can see it in the list of processes, so rather "
            "set HEADRACE_API_KEY  [default: first of HEADRACE_API_KEYS]",
        ),
        click.Option(["--system"], help="System message of a new conversation"),
        click.Option(["--continue", "goes_on"], is_flag=True, help="Go on where the last one was"),
        click.Option(["--resume", "number"], type=int, help="Go on with the one of this number"),
        click.Option(
            ["--list", "lists"], is_flag=True, help="List the conversations that are kept"
        ),
        _FIELD,
    ]
    return click.Command("chat", callback=run, params=params, help=run.__doc__)


def _doctor_command() -> click.Command:
    def run(
        model: str | None, as_json: bool, loss: Path | None, config_file: Path | None, **flags: Any
    ) -> None:
        """Look for what would keep this machine from serving, and with MODEL how it would be run.
        Changes nothing. Exit code 1 if something is broken.

        \b
        headrace doctor
        headrace doctor ./my-model --json
        headrace doctor ./my-model --loss text.txt
        """
        with _starting():
            from headrace.cli.doctor import doctor

        if loss is not None and model is None and config_file is None:
            raise click.UsageError("--loss needs a model to measure.")
        sys.exit(doctor(_config(model, flags, config_file), model, as_json, loss))

    params: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the findings as JSON"),
        click.Option(
            ["--loss"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Measure on this text what fewer bits of the model lose",
        ),
        *_several(),
        *_options(),
    ]
    return click.Command("doctor", callback=run, params=params, help=run.__doc__)


@click.group()
@click.version_option(__version__)
def cli() -> None:
    """An LLM inference server whose streams are never silent, never stalled, never lost."""


for command in (
    _serve_command(),
    _chat_command(),
    _generate_command(),
    _embed_command(),
    _doctor_command(),
    models,
    pull,
    merge,
    cache,
    batch,
    bench,
):
    cli.add_command(command)


def main() -> None:
    """Entry point; a failure is one line on stderr and its exit code."""
    make_usable()
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(exits.INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(exits.CONFIG)
    except BrokenPipeError:  # nobody reads our output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exits.FAILED)
    except STEERING:
        raise
    except BaseException as error:  # a library's panic is not an Exception
        code, message = _explain(error)
        print(f"headrace: {message}", file=sys.stderr, flush=True)
        if os.environ.get(_DEBUG) == "debug" or logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exception(error)
        sys.exit(code)


def _explain(error: BaseException) -> tuple[int, str]:
    match error:
        case click.ClickException():
            return exits.CONFIG, error.format_message()
        case ConfigError():
            return exits.CONFIG, str(error)
        case ModuleNotFoundError() if error.name in _OF_UNIX:
            return exits.FAILED, "This needs Linux or macOS; on Windows, run it in WSL."
        case ModuleNotFoundError() if is_missing_engine(error):
            return exits.CONFIG, WITHOUT_ENGINE
        case ModelError():
            return exits.MODEL, str(error)
        case RequestFailed() if error.code in _WRONG_FIELD:
            return exits.CONFIG, str(error)
        case HeadraceError():
            return exits.FAILED, str(error)
    name = type(error).__name__
    return exits.FAILED, (
        f"failed by a bug: {name}: {error}. Run it again with {_DEBUG}=debug to see where."
    )
