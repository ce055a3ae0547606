"""Plants known faults in the server, and reports which of them the simulation finds.

`python -m stress.simulated_server.planted --budget SECONDS [NAME...]` runs seeds with each fault
until a check fails or the fault has used SECONDS of processor time. A seed counts only if the same
seed has no violation without the fault.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

from headrace.fleet.served_model import ServedModel
from stress.simulated_server.planted_faults import FAULTS
from stress.simulated_server.planted_fixes import FIXES
from stress.simulated_server.planting import Fault, Planted
from stress.simulated_server.run import read_model, run_once, strategy_of

T = TypeVar("T")

ALL: dict[str, Fault] = {**FAULTS, **FIXES}
"""All faults by name: invented ones, and faults that the server once had."""

SEED_S = 120.0
"""A seed that takes longer than this never ends."""
_WIDTH = 110


class SeedResult(NamedTuple):
    """`failure` is empty if all checks passed. `num_visits` counts runs of the changed lines."""

    failure: str
    num_visits: int
    cpu_s: float


class Report(NamedTuple):
    """The result for one fault. `failure` is empty if the fault was not found."""

    num_seeds: int
    num_reached: int
    cpu_s: float
    seed: int
    failure: str
    # Seeds with a violation that the server has without the fault, too.
    unsound: tuple[int, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.simulated_server.planted", description=__doc__)
    parser.add_argument("--budget", type=float, default=120.0, help="processor seconds per fault")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--show", action="store_true", help="print the whole violation")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all if none is named")
    options = parser.parse_args()
    if unknown := set(options.names) - ALL.keys():
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    # A fault that does not fit any more ends the command before any seed runs.
    for fault in ALL.values():
        Planted(fault)
    model = read_model()
    num_missed = num_unsound = 0
    print(f"{'fault':44} {'kind':24} {'seeds':>5} {'reached':>7} {'cpu s':>6}  violation")
    for name in options.names or ALL:
        report = look_for(ALL[name], model, options.budget, options.first)
        num_missed += not report.failure
        num_unsound += len(report.unsound)
        print(_line(name, report), flush=True)
        if options.show:
            print(report.failure)
    print(f"{num_missed} faults were not found")
    return 1 if num_missed or num_unsound else 0


def look_for(fault: Fault, model: ServedModel, budget_s: float, first: int = 0) -> Report:
    """Run seeds with a fault until a check fails or the budget of processor time is used up.

    A quarter of the budget must be enough to reach the changed lines.
    """
    seed, num_reached, cpu_s = first, 0, 0.0
    unsound: list[int] = []
    while cpu_s < (budget_s if num_reached else budget_s / 4):
        found = run_seed(seed, fault, model)
        cpu_s += found.cpu_s
        num_reached += found.num_visits > 0
        seed += 1
        if not found.failure:
            continue
        if not run_seed(seed - 1, None, model).failure:
            num = seed - first
            return Report(num, num_reached, cpu_s, seed - 1, found.failure, tuple(unsound))
        unsound.append(seed - 1)
    return Report(seed - first, num_reached, cpu_s, -1, "", tuple(unsound))


def run_seed(seed: int, fault: Fault | None, model: ServedModel) -> SeedResult:
    """Run a seed in a new process, in which the fault is planted."""

    def work() -> SeedResult:
        planted = Planted(fault) if fault else None
        if planted:
            planted.apply()
        failure = run_once(strategy_of(seed), model).failure
        num_visits = planted.visits.total() if planted else 0
        return SeedResult(failure, num_visits, time.process_time())

    return _in_child(work, SeedResult("the process died or never ended", 1, SEED_S))


def _in_child(work: Callable[[], T], otherwise: T) -> T:
    """Return the result of `work` in a forked process, or `otherwise` if it does not return."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(work, sender), daemon=True)
    child.start()
    sender.close()
    try:
        result: T = receiver.recv() if receiver.poll(SEED_S) else otherwise
    except EOFError:
        result = otherwise
    child.kill()
    child.join()
    receiver.close()
    return result


def _send(work: Callable[[], T], sender: Connection) -> None:
    sender.send(work())


def _line(name: str, report: Report) -> str:
    words = f"{report.num_seeds:5} {report.num_reached:7} {report.cpu_s:6.1f}"
    result = "NOT FOUND"
    if report.failure:
        result = f"seed {report.seed}: {summary_of(report.failure)[:_WIDTH]}"
    if report.unsound:
        result += f" (without the fault, seeds {[*report.unsound]} fail too)"
    return f"{name:44} {ALL[name].kind:24} {words}  {result}"


def summary_of(failure: str) -> str:
    """Return the line of a traceback that says what was violated."""
    lines = [line.strip("| +-") for line in failure.splitlines() if line.strip("| +-")]
    named = [line for line in lines if ": " in line and line.partition(":")[0].isidentifier()]
    errors = [line for line in named if not line.startswith("ExceptionGroup")]
    return (errors or lines)[-1]


if __name__ == "__main__":
    sys.exit(main())
