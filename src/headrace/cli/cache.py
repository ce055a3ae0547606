"""`headrace cache`: the prefixes that servers left on disk, shown and cleared."""

import os
import time
from pathlib import Path

import click

from headrace_common.config.sources import PREFIX
from headrace_common.errors import ConfigError

_COLUMNS = ("model", "lane", "dtype", "kernels", "files", "size", "last used")
_FOLDER = click.option(
    "--prefix-cache-dir",
    "given",
    metavar="DIR",
    help=f"Folder, as given to serve  [default: {PREFIX}PREFIX_CACHE_DIR]",
)


@click.group("cache")
def cache() -> None:
    """Show or clear the prefixes on disk that servers with --prefix-cache-dir left. Servers that
    run may go on: a prefix that is gone is computed again.
    """


@cache.command("show")
@_FOLDER
def show(given: str | None) -> None:
    """List what is there by model: files, size, and when one was last used.

    \b
    headrace cache show --prefix-cache-dir ~/.cache/headrace/prefixes
    """
    from headrace_engine.prefixes import folder

    rows = [_COLUMNS, *(_row(path) for path in folder.model_folders(_root(given)))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@cache.command("clear")
@_FOLDER
def clear(given: str | None) -> None:
    """Remove all of it; other things in the folder stay.

    \b
    headrace cache clear --prefix-cache-dir ~/.cache/headrace/prefixes
    """
    from headrace_engine.prefixes import folder

    num_files, num_bytes = folder.clear(_root(given))
    click.echo(f"Removed {num_files} files, {num_bytes / (1 << 20):.0f} MiB.")


def _root(given: str | None) -> Path:
    name = given or os.environ.get(f"{PREFIX}PREFIX_CACHE_DIR")
    if not name:
        raise ConfigError(
            f"No folder is named; give --prefix-cache-dir, or set {PREFIX}PREFIX_CACHE_DIR."
        )
    root = Path(name).expanduser()
    if not root.is_dir():
        raise ConfigError(f"--prefix-cache-dir: {root} is no folder; give the one that serve has.")
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
