"""Lays out help texts: commands and settings in sections, and rare settings behind --help-all."""

from collections.abc import Mapping
from typing import Any

import click

from headrace_common.config.sources import WITHOUT_VALUE, Setting

_SHOWS_ALL = f"{__name__}.shows_all"
_LONGEST_CHOICES = 36
_OWN = "Options"
# A line may not end within a flag or a default, so that people can copy the flag.
_UNBROKEN = {ord("-"): "\N{NON-BREAKING HYPHEN}"}
_BROKEN = {ord("\N{NON-BREAKING HYPHEN}"): "-", ord("\N{NO-BREAK SPACE}"): " "}

COMMON = {
    "Model": (
        *("alias", "adapter", "max_model_len", "quantize", "device", "threads"),
        "kv_cache_memory_bytes",
    ),
    "Network": ("host", "port", "api_key_file", "ssl_certfile", "ssl_keyfile", "allowed_origins"),
    "Limits": ("max_num_seqs", "max_stall_ms", "max_models", "idle_unload_s"),
    "Storage": ("models_dir", "state_dir", "prefix_cache_dir"),
    "Logging": ("log_level", "log_format"),
}
"""Sections of the help, with the settings that are shown without --help-all."""

_SECTIONS = {name: section for section, names in COMMON.items() for name in names}
_REST = {
    "models": "Model",
    "scheduler": "Scheduling",
    "prefix_cache": "Storage",
    "loading": "Limits",
    "batches": "Files and batches",
    "http": "Network",
    "streams": "Streams and clients",
    "cluster": "Network",
    "otlp_endpoint": "Logging",
}
"""Sections of the other settings, by the part of the configuration or the setting's name."""


class SectionedGroup(click.Group):
    """A group that lists its commands in sections, and does not cut their summaries.

    `sections` maps titles to names of commands. The other commands are listed as "Commands".
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, tuple[str, ...]] | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._sections = sections or {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {name for names in self._sections.values() for name in names}
        others = [name for name in self.list_commands(ctx) if name not in named]
        for title, names in (*self._sections.items(), ("Commands", others)):
            found = [(name, self.commands[name]) for name in names if name in self.commands]
            rows = [(name, it.get_short_help_str(1 << 10)) for name, it in found]
            if rows := [row for row, (_, it) in zip(rows, found, strict=True) if not it.hidden]:
                with formatter.section(title):
                    formatter.write_dl(rows)


class SettingOption(click.Option):
    """The flag of a setting. The value is checked with the whole configuration, not by click."""

    def __init__(self, setting: Setting) -> None:
        is_flag, choices = setting.type is bool, setting.choices
        alone = WITHOUT_VALUE.get(setting.name)
        more: dict[str, Any] = {} if alone is None else {"flag_value": alone}
        text, value_name = setting.description, setting.value_name
        if len(value_name) > _LONGEST_CHOICES:
            text, value_name = f"{text}. One of {', '.join(choices)}", "CHOICE"
        if (default := setting.default) not in (None, (), False, ""):
            shown = f"{default:g}" if isinstance(default, float) else default
            text += f"  [default:\N{NO-BREAK SPACE}{shown}]"
        super().__init__(
            [*setting.flags, setting.name],
            type=bool if is_flag else click.Choice(choices) if choices else str,
            is_flag=is_flag,
            metavar=None if is_flag else value_name if alone is None else f"[{value_name}]",
            multiple=setting.is_list,
            default=None,
            help=text.translate(_UNBROKEN),
            **more,
        )
        self.is_common = setting.name in _SECTIONS
        self.section = _SECTIONS.get(setting.name) or _REST[setting.path[-2:][0]]


class SettingsCommand(click.Command):
    """A command with a flag for each setting. Its help shows rare settings only with --help-all."""

    def __init__(self, name: str, *, params: list[click.Parameter], **more: Any) -> None:
        number = sum(isinstance(param, SettingOption) for param in params)
        shown = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help=f"Show this message with all {number} settings and exit.",
        )
        super().__init__(name, params=[*params, shown], **more)

    def get_help(self, ctx: click.Context) -> str:
        return super().get_help(ctx).translate(_BROKEN)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {_OWN: [], **{title: [] for title in COMMON}}
        for param in self.get_params(ctx):
            title = _OWN
            if isinstance(param, SettingOption):
                if not (param.is_common or shows_all):
                    continue
                title = param.section
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _show_all(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        context.meta[_SHOWS_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()
