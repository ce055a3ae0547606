"""The result file of `headrace bench matrix`. Later runs resume from it."""

from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.grid import MixedLoad
from headrace.bench.record import Evidence
from headrace.bench.report import aligned, write
from headrace_common.errors import ConfigError

_HEAD = ("chunking", "streams", "rate", "prompt", "cached", "valid")
_SHOWN = ("p50", "p99")


class MatrixRow(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one cell: one load, and one chunking mode."""

    chunking: str
    load: MixedLoad
    # Reasons why the cell is not valid; empty for a valid cell.
    reasons: tuple[str, ...] = ()
    # Time between two tokens of a stream, from the first prompt to the last prompt's first token.
    itl_ms: dict[str, float] = {}
    ttft_ms: dict[str, float] = {}
    # The gaps in `itl_ms` during which at least one prompt was waiting for its first token.
    stall_ms: dict[str, float] = {}
    # The server's ingestion report for a prompt that was sent before the streams; None if there
    # is none.
    ingestion: dict[str, Any] | None = None
    evidence: Evidence | None = None
    # Fraction of all cores that other programs used in the second before the cell.
    busy_before: float | None = None


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The values that all cells of a file have in common."""

    model: str  # the model that was served, or the URL of the server
    flags: tuple[str, ...]
    machine: dict[str, Any]
    revision: str | None
    seed: int
    num_prompts: int


class MatrixResults(msgspec.Struct, kw_only=True):
    """All finished cells. `commands` are the commands that measured the cells."""

    benchmark: str = "matrix"
    conditions: Conditions
    commands: list[str] = []
    # Each chunking mode's server, as the server describes itself.
    servers: dict[str, dict[str, Any]] = {}
    rows: list[MatrixRow] = []

    def missing(self, chunking: str, loads: list[MixedLoad]) -> list[MixedLoad]:
        """Return the loads that were not measured yet."""
        done = {row.load for row in self.rows if row.chunking == chunking}
        return [load for load in loads if load not in done]

    def table(self) -> str:
        names = [f"{what} {name}" for what in ("ITL", "TTFT") for name in _SHOWN]
        lines = [(*_HEAD, *names), *map(_line, self.rows)]
        reasons = [f"not valid: {row.load}: {why}" for row in self.rows for why in row.reasons]
        return "\n".join([*aligned(lines), "milliseconds", *reasons])


def open_results(file: Path | None, conditions: Conditions, command: str) -> MatrixResults:
    """Load the results in `file`, so that the run can resume; without a file, return empty results.

    Raise ConfigError if the file's cells cannot be compared with new ones.
    """
    results = MatrixResults(conditions=conditions)
    if file is not None and file.exists():
        results = _read(file)
        was, now = map(msgspec.to_builtins, (results.conditions, conditions))
        differ = [
            f"{name} {was[name]!r}, not {now[name]!r}" for name in now if was[name] != now[name]
        ]
        if differ:
            raise ConfigError(
                f"--json: {file} was measured with {'; '.join(differ)}. Choose another file, or "
                "delete this one."
            )
    if command not in results.commands:
        results.commands.append(command)
    return results


def save(results: MatrixResults, file: Path | None) -> None:
    if file is not None:
        write(file, msgspec.to_builtins(results))


def _read(file: Path) -> MatrixResults:
    try:
        results = msgspec.json.decode(file.read_bytes(), type=MatrixResults)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"--json: {file} has no results of this benchmark to continue ({error}). Choose "
            "another file."
        ) from None
    return results


def _line(row: MatrixRow) -> tuple[str, ...]:
    load = row.load
    values = [times.get(name) for times in (row.itl_ms, row.ttft_ms) for name in _SHOWN]
    return (
        row.chunking,
        str(load.num_streams),
        f"{load.rate:g}",
        str(load.prompt_tokens),
        f"{load.cached_share:g}",
        str(not row.reasons).lower(),
        *("-" if value is None else f"{value:.1f}" for value in values),
    )
