"""Judges whether prompts were really processed while streams ran; has no side effects."""

from headrace.bench.figures import measured
from headrace.bench.record import Cell


def reasons(cell: Cell) -> tuple[str, ...]:
    """Return the reasons why the cell is not valid; empty for a valid cell."""
    if cell.plan is None:
        return tuple(_broken(cell))
    return tuple(_broken(cell) + _beside(cell))


def drifted(cells: list[Cell], tolerance: float) -> str | None:
    """Return why the cells are not valid, or None if the machine's speed has not changed.

    The speed has changed if the times of equal prompts on the idle server vary too much.
    """
    by_length: dict[int, list[float]] = {}
    for cell in cells:
        if cell.plan:
            by_length.setdefault(cell.plan.prompt_tokens, []).extend(cell.prompt_s)
    for length, seconds in by_length.items():
        if seconds and max(seconds) > tolerance * min(seconds):
            return (
                f"a prompt of {length} tokens took {min(seconds):.2f} s to {max(seconds):.2f} s "
                "without streams, so the machine's speed changed"
            )
    return None


def _broken(cell: Cell) -> list[str]:
    found = []
    if any(round.lost_at is not None for round in cell.rounds):
        found.append("a stream ended while it was needed")
    if cell.evidence and cell.evidence.num_starts:
        found.append("the engine restarted")
    return found


def _beside(cell: Cell) -> list[str]:
    found = []
    if cell.evidence and not cell.evidence.num_mixed:
        found.append(
            f"no step processed prompt tokens together with all {cell.num_streams} streams"
        )
    all_measured = measured(cell)
    unanswered = sum(it.first_token is None for it in all_measured)
    if unanswered or not all_measured:
        found.append(
            f"{unanswered} of {len(all_measured)} prompts had no first token while the streams ran"
        )
    return found
