"""`headrace config`: prints the effective settings and where each setting comes from."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.cli.logs import printable
from headrace.cli.stdio import print_table
from headrace_common.config.settings import ServerConfig
from headrace_common.config.sources import SECRET_SETTINGS, Setting, settings

_DEFAULT = "default"
_COLUMNS = ("setting", "value", "from")
_LONGEST_VALUE = 60
_HIDDEN = "(hidden)"
# Passwords within the addresses of other services, such as redis://:password@host.
_PASSWORD = re.compile(r"(?<=://)[^/\s]*(?=@)|(?<=[?&]password=)[^&\s]*")


class EffectiveSetting(msgspec.Struct, frozen=True):
    """A setting as the server would use it. `model` is empty for settings of the whole server."""

    name: str
    value: Any
    default: Any
    origin: str
    model: str = ""


def effective(
    config: ServerConfig, origins: tuple[dict[str, str], ...], shows_all: bool = False
) -> Iterator[EffectiveSetting]:
    """Yield the settings that differ from their defaults, or all settings. Keys are hidden."""
    known = settings()
    for setting in known:
        if setting.path[0] != "models":
            value = _value(config, setting.path)
            if shows_all or value != setting.default:
                yield _effective(setting, value, origins[0])
    for model, own in zip(config.models, origins, strict=True):
        name = "" if len(config.models) == 1 else next(iter(model.served_model_name), model.model)
        for setting in known:
            if setting.path[0] == "models":
                value = _value(model, setting.path[1:])
                if shows_all or value != setting.default:
                    yield _effective(setting, value, own, name)


def show_config(found: list[EffectiveSetting], as_json: bool) -> None:
    """Print the settings as a table or as JSON."""
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    if not found:
        print("All settings have their defaults; --all lists them.")
        return
    print_table([_COLUMNS, *((_label(it), _words(it.value), it.origin) for it in found)])


def _value(part: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        part = getattr(part, name)
    return part


def _effective(
    setting: Setting, value: Any, origins: dict[str, str], model: str = ""
) -> EffectiveSetting:
    origin = origins.get(setting.name, _DEFAULT)
    for name in (setting.name, "alias"):
        origin = origin.removeprefix(f"{name} in ")
    if setting.name in SECRET_SETTINGS:
        value = [_HIDDEN] * len(value) if isinstance(value, tuple) else value and _HIDDEN
    elif isinstance(value, str):
        value = _PASSWORD.sub("***", value)
    return EffectiveSetting(setting.name, value, setting.default, origin, model)


def _label(setting: EffectiveSetting) -> str:
    return printable(f"{setting.model}: {setting.name}" if setting.model else setting.name)


def _words(value: Any) -> str:
    if value is None or value in ((), []):
        return "-"
    is_list = isinstance(value, list | tuple)
    text = printable(", ".join(map(str, value)) if is_list else str(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
