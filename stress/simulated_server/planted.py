"""Plants known faults in the server, and reports which of them the simulation finds.

`python -m stress.simulated_server.planted --budget SECONDS [NAME...]` first runs
seeds without a fault. Then it runs those of them that reach the lines of a fault with the fault,
until two seeds fail or SECONDS of processor time are used up.
"""

import argparse
import multiprocessing
import re
import resource
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from multiprocessing.connection import Connection
from time import process_time
from typing import NamedTuple, TypeVar

from headrace.fleet.served_model import ServedModel
from stress.simulated_server.planted_faults import FAULTS
from stress.simulated_server.planted_fixes import FIXES
from stress.simulated_server.planting import Fault, Planted, Probe
from stress.simulated_server.run import read_model, run_once, strategy_of

T = TypeVar("T")

ALL: dict[str, Fault] = {**FAULTS, **FIXES}
"""All faults by name: invented ones, and faults that the server once had."""

NUM_CONFIRMED = 2
"""The number of seeds with a violation that end the search for a fault."""
SEED_S = 30
"""The processor time of a seed that does not end."""
_WIDTH = 110


class SeedResult(NamedTuple):
    """`failure` is empty if all checks passed."""

    failure: str
    # How often the lines of each fault ran, by the fault's place in ALL.
    visits: Mapping[int, int]
    cpu_s: float
    digest: str = ""


class Report(NamedTuple):
    """The result for one fault. `failure` is empty if the fault was not found.

    `seeds` are the seeds with a violation. A single one may have another cause, since each change
    of the code also changes the order of the tasks in a seed.
    """

    num_seeds: int
    cpu_s: float
    seeds: tuple[int, ...]
    failure: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.simulated_server.planted", description=__doc__)
    parser.add_argument("--budget", type=float, default=120.0, help="processor seconds per fault")
    parser.add_argument("--seeds", type=int, default=200, help="seeds to choose from")
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
    seeds = range(options.first, options.first + options.seeds)
    sound, known = sound_seeds(seeds, model)
    num_missed = 0
    print(f"{'fault':48} {'kind':24} {'reach':>5} {'seeds':>5} {'cpu s':>6}  violation")
    for name in options.names or ALL:
        reaching = seeds_of(name, sound)
        report = look_for(ALL[name], reaching, known, model, options.budget)
        num_missed += not report.failure
        print(_line(name, len(reaching), report), flush=True)
        if options.show:
            print(report.failure)
    print(f"{num_missed} faults were not found")
    return 1 if num_missed or len(sound) < len(seeds) else 0


def sound_seeds(
    seeds: Iterable[int], model: ServedModel
) -> tuple[dict[int, SeedResult], frozenset[str]]:
    """Run seeds without a fault.

    Return the seeds without a violation, and the forms of all violations, which prove nothing.
    """
    sound: dict[int, SeedResult] = {}
    known = set[str]()
    for seed in seeds:
        result = run_seed(seed, None, model)
        if result.failure:
            known.add(form_of(result.failure))
            print(f"seed {seed} fails without a fault: {summary_of(result.failure)}")
        else:
            sound[seed] = result
    cpu_s = sum(result.cpu_s for result in sound.values())
    print(f"{len(sound)} seeds without a violation, {cpu_s:.0f} s of the processor")
    return sound, frozenset(known)


def seeds_of(name: str, sound: Mapping[int, SeedResult]) -> list[int]:
    """Return the seeds that run the lines that this fault changes."""
    number = list(ALL).index(name)
    return [seed for seed, result in sound.items() if result.visits.get(number)]


def look_for(
    fault: Fault,
    seeds: Iterable[int],
    known: Collection[str],
    model: ServedModel,
    budget_s: float,
) -> Report:
    """Run seeds with a fault until two of them fail or the processor time is used up.

    Violations of a known form are ignored.
    """
    num_seeds, cpu_s = 0, 0.0
    failures: dict[int, str] = {}
    for seed in seeds:
        found = run_seed(seed, fault, model)
        num_seeds += 1
        cpu_s += found.cpu_s
        if found.failure and form_of(found.failure) not in known:
            failures[seed] = found.failure
        if cpu_s >= budget_s or len(failures) == NUM_CONFIRMED:
            break
    return Report(num_seeds, cpu_s, tuple(failures), next(iter(failures.values()), ""))


def run_seed(seed: int, fault: Fault | None, model: ServedModel) -> SeedResult:
    """Run a seed in a new process with this fault; without one, count the lines that run."""

    def work() -> SeedResult:
        resource.setrlimit(resource.RLIMIT_CPU, (SEED_S, SEED_S))
        planted = Planted(fault) if fault else Probe([*ALL.values()])
        planted.apply()
        outcome = run_once(strategy_of(seed), model)
        visits = dict(planted.visits) if isinstance(planted, Probe) else {}
        return SeedResult(outcome.failure, visits, process_time(), outcome.digest)

    message = f"the seed took more than {SEED_S} s of processor time"
    return _in_child(work, SeedResult(message, {}, SEED_S))


def _in_child(work: Callable[[], T], otherwise: T) -> T:
    """Return the result of `work` in a forked process, or `otherwise` if it does not return."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(work, sender), daemon=True)
    child.start()
    sender.close()
    try:
        result: T = receiver.recv()
    except EOFError:
        result = otherwise
    child.join()
    receiver.close()
    return result


def _send(work: Callable[[], T], sender: Connection) -> None:
    sender.send(work())


def _line(name: str, num_reaching: int, report: Report) -> str:
    words = f"{num_reaching:5} {report.num_seeds:5} {report.cpu_s:6.1f}"
    result = "NOT FOUND" if num_reaching else "NOT REACHED"
    if report.failure:
        seeds = ", ".join(map(str, report.seeds))
        result = f"{seeds}: {summary_of(report.failure)[:_WIDTH]}"
    return f"{name:48} {ALL[name].kind:24} {words}  {result}"


def summary_of(failure: str) -> str:
    """Return the line of a traceback that says what was violated."""
    lines = [line.strip("| +-") for line in failure.splitlines() if line.strip("| +-")]
    named = [line for line in lines if ": " in line and line.partition(":")[0].isidentifier()]
    errors = [line for line in named if not line.startswith("ExceptionGroup")]
    return (errors or lines)[-1]


def form_of(failure: str) -> str:
    """Return the summary of a violation without numbers and ids, which differ between seeds."""
    return re.sub(r"[0-9a-f]{6,}|\d+|b?'.*", "#", summary_of(failure))


if __name__ == "__main__":
    sys.exit(main())
