"""Builders of benchmark cells."""

from headrace.bench.figures import figures
from headrace.bench.record import Cell, CellPlan, Evidence, Injection, Round

PLAN = CellPlan(name="wall", prompt_tokens=100, interval_s=0.0, num_warm_up=0, num_measured=1)
EVIDENCE = Evidence(
    num_steps=9, num_seen=9, num_mixed=3, num_starts=0, model_error=0.1, missed={"model": 1}
)


def make_round(
    *streams: tuple[float, ...], sent: float | None = 2.0, first_token: float | None = 4.0
) -> Round:
    """Return a round of ten seconds with a prompt that waits from second 2 to 4."""
    injections = () if sent is None else (Injection(sent, first_token, 100, False),)
    return Round(0.0, 10.0, streams, injections)


def make_cell(*rounds: Round, plan: CellPlan | None = PLAN, evidence: Evidence | None = EVIDENCE):
    cell = Cell(plan=plan, num_streams=1, rounds=rounds, evidence=evidence, prompt_s=(1.0, 1.1))
    cell.figures = figures(cell)
    return cell
