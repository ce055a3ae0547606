"""`headrace cache`: shows and clears the prefix caches that servers left on disk."""

import os
import time
from pathlib import Path

import click

from headrace.cli.help import SectionedGroup
from headrace.cli.stdio import print_table
from headrace_common.config.sources import PREFIX
from headrace_common.errors import ConfigError

_COLUMNS = ("model", "lane", "dtype", "kernels", "files", "size", "last used")
_FOLDER = click.option(
    "--prefix-cache-dir",
    "given",
    metavar="DIR",
    help=f"Same folder as for serve  [default: {PREFIX}PREFIX_CACHE_DIR, or auto]",
)


@click.group(
    "cache",
    cls=SectionedGroup,
    short_help="Show or clear the starts of prompts cached on disk.",
)
def cache() -> None:
    """Show or clear the starts of prompts (prefixes) that servers cached on disk.

    You can do this while servers run. If a prompt needs a removed prefix, the server processes the
    prefix again.
    """


@cache.command("show")
@_FOLDER
def show(given: str | None) -> None:
    """List the cached prefixes by model: files, size and time of the last use.

    \b
    headrace cache show
    headrace cache show --prefix-cache-dir /mnt/prefixes
    """
    from headrace_engine.prefixes import folder

    print_table([_COLUMNS, *(_row(path) for path in folder.model_folders(_root(given)))])


@cache.command("clear")
@_FOLDER
def clear(given: str | None) -> None:
    """Remove all cached prefixes. Other files in the folder stay.

    \b
    headrace cache clear
    headrace cache clear --prefix-cache-dir /mnt/prefixes
    """
    from headrace_engine.prefixes import folder

    num_files, num_bytes = folder.clear(_root(given))
    click.echo(f"Removed {num_files} files, {num_bytes / (1 << 20):.0f} MiB.")


def _root(given: str | None) -> Path:
    from headrace_engine.prefixes.place import AUTO, NONE, default_folder

    name = given or os.environ.get(f"{PREFIX}PREFIX_CACHE_DIR") or AUTO
    root = default_folder() if name in (AUTO, NONE) else Path(name).expanduser()
    if not root.is_dir() and root != default_folder():
        raise ConfigError(
            f"--prefix-cache-dir: {root} is not a folder; give the folder of `headrace serve`."
        )
    return root


def _row(path: Path) -> tuple[str, ...]:
    from headrace_engine.prefixes import folder

    found = [file for file in folder.files(path) if file.first >= 0]
    size = sum(file.num_bytes for file in found)
    used_at = max((file.used_at for file in found), default=0.0)
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(used_at)) if found else "-"
    known = folder.about(path)
    about = (known.model, known.lane, known.dtype, known.kernels) if known else ("?",) * 4
    return (*about, str(len(found)), f"{size / (1 << 20):.0f} MiB", used)
