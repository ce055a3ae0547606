"""The help of every verb: its width, its sections, the types of values and the rare settings."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from headrace.cli.help import COMMON
from headrace.cli.main import cli
from headrace_common.config.sources import Setting, settings
from tools.make_cli_docs import WIDTH


def verbs(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, verb in command.commands.items():
            yield from verbs(verb, (*path, name))


def help_of(*words: str, flag: str = "--help") -> str:
    shown = CliRunner().invoke(cli, [*words, flag], prog_name="headrace", terminal_width=WIDTH)
    assert shown.exit_code == 0, shown.output
    return shown.output


def place_of(setting: Setting) -> str:
    """Return a pattern of the start of the setting's line in a help text."""
    return rf"(?m)^  (-\w+, )*{setting.flags[0]}[ ,\n]"


@pytest.mark.parametrize("path", [*verbs(cli)], ids=" ".join)
def test_help_fits_80_columns_and_cuts_nothing(path: tuple[str, ...]) -> None:
    flags = ["--help", *(["--help-all"] if "--help-all" in help_of(*path) else [])]
    for flag in flags:
        lines = help_of(*path, flag=flag).splitlines()
        assert not [line for line in lines if len(line) > WIDTH]
        assert not [line for line in lines if line.endswith("...") and "Usage" not in line]
        assert not [line for line in lines if re.search(r"\w-$", line)]


@pytest.mark.parametrize("path", [*verbs(cli)], ids=" ".join)
def test_options_name_what_they_take(path: tuple[str, ...]) -> None:
    context = click.Context(cli)
    verb: click.Command = cli
    for name in path:
        assert isinstance(verb, click.Group)
        verb = verb.commands[name]
    options = [it for it in verb.params if isinstance(it, click.Option) and not it.is_flag]
    named = {it.name: it.make_metavar(context) for it in options}
    assert [name for name, value in named.items() if value in ("TEXT", "PATH", "FLOAT")] in (
        [],
        ["system"],
    )
    assert all(it.help for it in options)


def test_every_verb_is_listed_once_in_a_section() -> None:
    text = help_of()
    assert "\nCommands:" not in text
    for name, verb in cli.commands.items():
        lines = [line for line in text.splitlines() if line.startswith(f"  {name}  ")]
        assert len(lines) == (not verb.hidden), name


def test_serve_shows_about_20_settings_in_five_sections_and_says_how_to_see_all() -> None:
    short, full = help_of("serve"), help_of("serve", flag="--help-all")
    known = [setting for setting in settings() if setting.name != "model"]
    assert [title for title in COMMON if f"\n{title}:\n" in short] == list(COMMON)
    shown = [setting for setting in known if re.search(place_of(setting), short)]
    assert {setting.name for setting in shown} == {it for names in COMMON.values() for it in names}
    assert len(shown) <= 24
    assert f"--help-all         Show this message with all {len(known)} settings" in short
    assert not [setting.name for setting in known if not re.search(place_of(setting), full)]


def test_values_are_named_by_their_unit_or_type() -> None:
    named = {setting.name: setting.value_name for setting in settings()}
    assert named["idle_unload_s"] == "SECONDS"
    assert named["max_stall_ms"] == "MILLISECONDS|off"
    assert named["threads"] == "INTEGER|auto"
    assert named["patience"] == "NUMBER"
    assert named["models_dir"] == "FOLDER"
    assert named["prefix_cache_dir"] == "FOLDER|auto|none"
    assert named["ssl_certfile"] == "FILE"
    assert named["adapter"] == "NAME=PATH"
    assert named["log_format"] == "text|json"


def test_a_wrong_number_is_still_explained_by_the_configuration() -> None:
    error = CliRunner().invoke(cli, ["serve", "--max-num-seqs", "many"]).exception
    assert str(error) == '--max-num-seqs is "many"; it must be a whole number of at least 1.'
