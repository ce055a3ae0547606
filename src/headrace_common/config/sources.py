"""Combines flags, environment and file into one configuration.

All flags, variables and keys are generated from the fields of the configuration.
"""

import difflib
import os
import re
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace_common.config.piped_text import with_piped_templates
from headrace_common.config.plain_aliases import with_names
from headrace_common.config.settings import INTERNAL_LIMITS, ModelConfig, ServerConfig
from headrace_common.errors import ConfigError

PREFIX = "HEADRACE_"
ALIASES = {
    "max_model_len": ("-c", "--ctx-size"),
    "max_num_seqs": ("-np", "--parallel"),
    "max_step_tokens": ("--max-num-batched-tokens",),
    "threads": ("-t",),
}
WITHOUT_VALUE = {"cluster": "auto"}
"""The values of settings whose flag can be given without a value."""

_ENVIRONMENT_NAMES = {"api_key": "HEADRACE_API_KEYS"}
_NOT_SETTINGS = {"HEADRACE_URL", "HEADRACE_CONFIG"}
_SECRETS = ("HEADRACE_API_KEY", "HEADRACE_API_KEYS", "HEADRACE_ADMIN_KEY")

# Clients send this key, and servers require it.
_CLIENTS_KEY = "HEADRACE_API_KEY"
_OTHERS_MAY_READ = 0o044
_COMMA_SEPARATED = ("allowed_host", "allowed_origins")  # lists whose items contain no comma
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^\s/?#@:*\[\]]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?/?")
# A folder with one of these files is a model. modules.json belongs to sentence-transformers.
_MODEL_SIGNS = ("config.json", "modules.json")
_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_VALUE_NAMES = {int: "INTEGER", float: "NUMBER"}
_UNITS = {
    "_s": "SECONDS",
    "_ms": "MILLISECONDS",
    "_days": "DAYS",
    "_bytes": "BYTES",
    "_dir": "FOLDER",
    "file": "FILE",
}
"""Ends of settings' names, with the names of such values in help texts."""
SECRET_SETTINGS = ("api_key", "admin_key")
_OF_ONE_MODEL = ("model", "revision", "mmproj", "served_model_name", "adapter")


class Setting(NamedTuple):
    """One field of the configuration.

    `path` has the names of the nested structs, followed by the name of the field.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    default: Any
    description: str
    allowed: str  # description of the allowed values
    value_name: str  # name of the value in help texts, such as SECONDS or INTEGER|auto

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"--{self.name.replace('_', '-')}", *ALIASES.get(self.name, ()))

    @property
    def variable(self) -> str:
        return _ENVIRONMENT_NAMES.get(self.name, PREFIX + self.name.upper())

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()


def settings() -> tuple[Setting, ...]:
    """Return every setting of a server, in the order of the fields."""
    return tuple(_walk(ServerConfig, ()))


def _walk(struct: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[Setting]:
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if field.name == "models":
            yield from _walk(ModelConfig, (*path, field.name))
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _walk(hint, (*path, field.name))
        else:
            base, *rest = typing.get_args(hint)
            description = next(m.description for m in rest if m.description)
            plain = _without_none(base)
            place = (*path, field.name)
            named = next((m.title for m in rest if m.title), None)
            yield Setting(
                name=field.name,
                path=place,
                type=plain,
                default=field.default,
                description=description,
                allowed=_allowed(hint),
                value_name=named or _value_name(field.name, plain, base),
            )


def _value_name(name: str, plain: Any, hint: Any) -> str:
    """Return the name of a setting's value: a unit or a type, and the words that are allowed."""
    parts = (hint, *typing.get_args(hint))
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    words = [word for part in literals for word in typing.get_args(part)]
    if plain in literals:
        return "|".join(words)
    units = (unit for end, unit in _UNITS.items() if name.endswith(end))
    return "|".join([next(units, _VALUE_NAMES.get(plain, "TEXT")), *words])


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def _allowed(hint: Any) -> str:
    """Describe the allowed values: a type with its range, or choices. None is not mentioned."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return ", or ".join(_allowed(part) for part in parts)
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if typing.get_origin(hint) is tuple:
        _, *metas = typing.get_args(typing.get_args(hint)[0]) or (str,)
        if samples := [one for meta in metas for one in meta.examples or ()]:
            return f"a list of strings such as {samples[0]}"
        return "a list of strings, none of them empty" if metas else "a list of strings"
    base, *metas = typing.get_args(hint) or (hint,)
    if base not in _WORDS:
        return _allowed(base)
    if samples := [one for meta in metas for one in meta.examples or ()]:
        return f"{_WORDS[base]} such as {samples[0]}"
    limits = " and ".join(words for meta in metas for words in _range(meta))
    return f"{_WORDS[base]} {limits}".rstrip()


def _range(meta: msgspec.Meta) -> Iterator[str]:
    highest = None if meta.le in INTERNAL_LIMITS else meta.le
    if meta.ge is not None and highest is not None:
        yield f"from {meta.ge:.0f} to {highest:.0f}"
        return
    limits = {"of at least": meta.ge, "above": meta.gt, "at most": highest}
    yield from (f"{words} {limit:.0f}" for words, limit in limits.items() if limit is not None)


Warn = Callable[[str], None]


def _say_nothing(line: str) -> None:
    pass


def load(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None,
    warn: Warn = _say_nothing,
    are_options: bool = False,
) -> ServerConfig:
    """Read the configuration. Flags take precedence over environment, file and defaults.

    Raises ConfigError with the mistake. Key files are only read as a check, because they may change
    while the server runs. `warn` receives messages about harmless mistakes. With `are_options`,
    `flags` are the options of a Python caller, and errors use the names of options.
    """
    return load_with_origins(flags, environment, file, warn, are_options)[0]


def load_with_origins(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None,
    warn: Warn = _say_nothing,
    are_options: bool = False,
) -> tuple[ServerConfig, tuple[dict[str, str], ...]]:
    """Read the configuration like `load`, and return the origins of the settings of each model.

    An origin is a flag, a variable or a place in the file. Settings with their defaults have none.
    """
    known = {setting.name: setting for setting in settings()}
    for name in flags:
        if name not in known and name != "models_at":
            raise ConfigError(f"Unknown option {name}{nearest(name, known)}")
    from_environment = _from_environment(environment, known, warn)
    from_file, tables = _from_file(file, known, warn)
    for number, table in enumerate(tables, 1):
        _check_own_settings(known, table, f"in [[models]] {number} of {file}")
    places = [f"{file}, [[models]]"] * len(tables)
    tables += _named(flags.get("models_at", ()))
    places += ["--model"] * (len(tables) - len(places))
    flags = {name: value for name, value in flags.items() if name != "models_at"}
    values, given_as = dict[str, Any](), dict[str, str]()
    sources: tuple[tuple[Mapping[str, Any], Callable[[str], str]], ...] = (
        (from_file, lambda name: f"{name} in {file}"),
        (from_environment, lambda name: known[name].variable),
        (flags, lambda name: name if are_options else known[name].flags[0]),
    )
    for source, form in sources:
        values |= _expanded(with_names(source))
        # `with_names` turns an alias into one of the model's names.
        given_as |= {it: form(it if it in source else "alias") for it in with_names(source)}
    for name in _COMMA_SEPARATED:
        if isinstance(given := values.get(name), list | tuple) and _are_texts(given):
            values[name] = [item for text in given for item in _items(text)]
            if name == "allowed_origins":
                values[name] = [_origin(item, given_as[name]) for item in values[name]]
    for name in ("api_key_file", "admin_key_file"):
        if path := values.get(name):
            read_keys(Path(path), warn, given_as[name])
    tree = _tree({known[name].path: value for name, value in values.items()})
    if (folder := values.get("models_dir")) is not None:
        tables += folder_models(Path(folder), given_as["models_dir"], warn)
        places += [given_as["models_dir"]] * (len(tables) - len(places))
    several = [own_settings(known, table) for table in tables]
    if several and "adapter" in values:
        raise ConfigError(
            f"{given_as['adapter']} is for a single model; with several models, write adapter in "
            "[[models]]."
        )
    if several or "models" in tree:
        tree["models"] = _models(tree.get("models", {}), several)
    try:
        config = msgspec.convert(tree, ServerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), known, values, given_as)) from None
    check_names(config.models)
    _check_replicas(config)
    return with_piped_templates(config), _model_origins(given_as, tables, places)


def _expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ~ in paths. Shells do so in `--name ~/x`, but not in `--name=~/x`."""
    return {
        name: os.path.expanduser(value)
        if name.endswith(("file", "_dir")) and isinstance(value, str)
        else value
        for name, value in values.items()
    }


def read_keys(
    file: Path, warn: Warn = _say_nothing, given_as: str = "--api-key-file"
) -> dict[str, str]:
    """Return the keys in a file, each with its name or "".

    A line is `key` or `name:key`. Empty lines and lines that start with # are skipped.
    """
    try:
        lines = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
        mode = file.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(
            f"{given_as}: cannot read {file}: {error.strerror}; use a file with one key per line."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{given_as}: {file} is not text; write one key per line.") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if colon and not (name.strip() and key.strip()):
            raise ConfigError(
                f"{given_as}: line {number} of {file} is not name:key; write a name and a key."
            )
        keys[key.strip() if colon else line] = name.strip() if colon else ""
    # Without keys, the server would be open to all.
    if not keys:
        raise ConfigError(
            f"{given_as}: {file} contains no key; write one per line, or remove the flag."
        )
    if mode & _OTHERS_MAY_READ:
        warn(f"other users can read {file} (mode {mode:o}); to prevent this, run chmod 600 {file}")
    return keys


def _from_environment(
    environment: Mapping[str, str], known: Mapping[str, Setting], warn: Warn
) -> dict[str, Any]:
    by_variable = {setting.variable: setting for setting in known.values()}
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _NOT_SETTINGS:
            continue
        if variable in _SECRETS and not _items(text):
            raise ConfigError(f"{variable} contains no key; set one, or unset the variable.")
        if variable == _CLIENTS_KEY:
            found.setdefault("api_key", _items(text))
            continue
        if variable not in by_variable:
            message = f"Unknown variable {variable}{nearest(variable, by_variable, PREFIX)}"
            # Ignoring such a variable might leave a server open by mistake.
            if "KEY" in variable:
                raise ConfigError(f"{message} Correct it or unset it.")
            warn(f"{message} It is ignored.")
            continue
        setting = by_variable[variable]
        found[setting.name] = _items(text) if setting.is_list else text
    return found


def _items(text: str) -> list[str]:
    """Split a list and drop empty items. An empty key would let everybody in."""
    return [item for part in text.split(",") if (item := part.strip())]


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _origin(text: str, given_as: str) -> str:
    """Return an origin in the form that browsers send.

    Raises ConfigError if no browser sends such an origin.
    """
    if text in ("*", "null"):
        return text
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        raise ConfigError(
            f"{given_as}: {text!r} is not an origin that a browser sends; give a scheme and a "
            "host without a path, such as https://app.example, or *."
        )
    scheme, host, port = found.groups()
    is_usual = (scheme, port) in (("http", ":80"), ("https", ":443"))
    return f"{scheme}://{host}" if is_usual else f"{scheme}://{host}{port or ''}"


def _check_own_settings(known: Mapping[str, Setting], table: Mapping[str, Any], place: str) -> None:
    try:
        msgspec.convert(own_settings(known, table), ModelConfig, strict=False)
    except msgspec.ValidationError as error:
        given_as = {name: f"{name} {place}" for name in table}
        raise ConfigError(_explain(str(error), known, table, given_as)) from None


def check_names(models: Iterable[ModelConfig]) -> None:
    """Raise ConfigError if two models have the same name. The second could never be requested."""
    names = Counter(
        name
        for model in models
        for name in (*model.served_model_name, *(it.partition("=")[0] for it in model.adapter))
    )
    for name, number in names.items():
        if number > 1:
            raise ConfigError(f"{number} models are named {name!r}; give each a name of its own.")


def _check_replicas(config: ServerConfig) -> None:
    for model in config.models:
        if model.min_replicas is not None and model.min_replicas > model.replicas:
            raise ConfigError(
                f"--min-replicas is {model.min_replicas}, but --replicas is only "
                f"{model.replicas}; raise --replicas or lower --min-replicas."
            )


def _model_origins(
    given_as: dict[str, str], tables: list[dict[str, Any]], places: list[str]
) -> tuple[dict[str, str], ...]:
    """Return the origins of the settings of each model, in the order of the models."""
    if not tables:
        return (given_as,)
    common = {name: origin for name, origin in given_as.items() if name not in _OF_ONE_MODEL}
    own = [
        {**common, **dict.fromkeys(table, place)}
        for table, place in zip(tables, places, strict=True)
    ]
    return (given_as, *own) if "model" in given_as else tuple(own)


def own_settings(known: Mapping[str, Setting], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one model as nested dictionaries."""
    return _tree({known[name].path[1:]: value for name, value in table.items()})


def _tree(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nest values in dictionaries by their paths."""
    tree: dict[str, Any] = {}
    for (*parents, leaf), value in values.items():
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return tree


def _models(shared: dict[str, Any], several: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each model's settings: the shared settings, and the settings of this model."""
    if not several:
        return [shared]
    common = {k: v for k, v in shared.items() if k not in _OF_ONE_MODEL}
    parts = {k: v for k, v in common.items() if isinstance(v, dict)}
    both = [
        {**common, **own, **{k: {**v, **own.get(k, {})} for k, v in parts.items()}}
        for own in several
    ]
    return [shared, *both] if "model" in shared else both


def folder_models(folder: Path, given_as: str, warn: Warn = _say_nothing) -> list[dict[str, Any]]:
    """Return the settings of each model in a folder. Unreadable subfolders are skipped."""
    root = folder.expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"{given_as}: {folder} is not a folder; use a folder that contains models."
        )
    found: dict[str, Path] = {}
    for name in sorted(os.listdir(root)):
        path = root / name
        # A file whose name starts with mmproj is the vision part of another file.
        is_model = name.endswith(".gguf") and not name.lower().startswith("mmproj")
        is_file = is_model and os.path.isfile(path)
        if not is_file and not any(os.path.isfile(path / sign) for sign in _MODEL_SIGNS):
            continue
        if not _is_text(name):
            warn(f"{name!a} in {folder} is skipped: its name is not UTF-8; rename it.")
            continue
        found[name] = path
    if not found:
        raise ConfigError(
            f"{given_as}: {folder} has no subfolder with a config.json, and no GGUF file; put a "
            "model there first."
        )
    # Folders come before files.
    ordered = sorted(found.items(), key=lambda item: not item[1].is_dir())
    served = {_served_name(name, path, found): path for name, path in ordered}
    return [{"model": str(path), "served_model_name": [name]} for name, path in served.items()]


def _served_name(name: str, path: Path, beside: Iterable[str]) -> str:
    """Return the name of a model: the file's name without .gguf, or the folder's name.

    A file keeps .gguf if a folder has the shorter name.
    """
    stem = name.removesuffix(".gguf")
    return name if path.is_dir() or stem in beside else stem


def _is_text(name: str) -> bool:
    """Return whether a file's name is UTF-8. Python reads other bytes as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(pairs: Iterable[str]) -> list[dict[str, Any]]:
    """Parse models given as NAME=PATH."""
    found = []
    for pair in pairs:
        name, sign, model = pair.partition("=")
        if not (name and sign and model):
            raise ConfigError(f"--model takes NAME=PATH, such as small=./my-model; it is {pair!r}.")
        found.append({"model": model, "served_model_name": [name]})
    return found


def _from_file(
    file: Path | None, known: Mapping[str, Setting], warn: Warn
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the table [serve] and the tables of [[models]]. [serve] applies to all models."""
    if file is None:
        return {}, []
    try:
        whole = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}.") from None
    table, models = whole.pop("serve", {}), whole.pop("models", [])
    if not isinstance(table, dict):
        raise ConfigError(
            f"serve in {file} is not a table; write [serve] and the settings under it."
        )
    if whole:
        others = ", ".join(whole)
        warn(f"Only [serve] and [[models]] are read from {file}; ignored: {others}.")
    for key in table:
        if key not in known:
            raise ConfigError(f"Unknown key {key!r} in {file}{nearest(key, known)}")
    if not (isinstance(models, list) and all(isinstance(model, dict) for model in models)):
        raise ConfigError(
            f"models in {file} is not a list of tables; write [[models]] for each model."
        )
    of_models = {name for name, setting in known.items() if setting.path[0] == "models"}
    for number, model in enumerate(models, 1):
        for key in model:
            if key not in of_models:
                what = f"Unknown key {key!r} in [[models]] {number} of {file}"
                raise ConfigError(f"{what}{nearest(key, of_models)}")
        if "model" not in model:
            raise ConfigError(f"[[models]] {number} of {file} has no model; name its folder or id.")
    return dict(table), models


def environment_without_keys() -> dict[str, str]:
    """Return this process's environment variables for a child process, which needs no keys."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message: a suggestion of a similar name, or a full stop.

    All names start with `prefix`.
    """
    names = sorted(one.removeprefix(prefix) for one in known)
    close = difflib.get_close_matches(name.removeprefix(prefix), names, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "."


def _explain(
    message: str,
    known: Mapping[str, Setting],
    values: Mapping[str, Any],
    given_as: Mapping[str, str],
) -> str:
    """Turn msgspec's `Expected `int` >= 1 - at `$.a.b`` into a sentence about the setting."""
    what, _, path = message.rpartition(" - at ")
    name = path.strip("`$").split(".")[-1].split("[")[0]
    if name not in given_as:
        return f"{path}: {what.replace('`', '')}."
    if name in SECRET_SETTINGS:
        return f"{given_as[name]} must be {known[name].allowed}."
    value = values[name]
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    for limit in INTERNAL_LIMITS:
        if what.endswith(f"<= {limit}"):
            return f"{given_as[name]} is {shown}; it must be at most {limit:.0f}."
    return f"{given_as[name]} is {shown}; it must be {known[name].allowed}."
