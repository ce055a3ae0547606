"""Defines the faults of a run: how often each of them happens, and how often it happened."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from detangle._choices import FAULT

from stress.simulated_server.system import world_loop


@dataclass
class Faults:
    """The probability of each fault, per occasion. After `stop`, nothing fails any more.

    `tell` adds a line to the story of the run.
    """

    rates: dict[str, float]
    tell: Callable[[str], None]
    injected: Counter[str] = field(default_factory=Counter)
    # Until this time, engines cannot load their model.
    loads_fail_until: float = 0.0

    def hits(self, kind: str) -> bool:
        """Return whether this fault happens now, and count it."""
        rate = self.rates.get(kind, 0.0)
        if not rate or not world_loop().flip(rate, FAULT):
            return False
        self.note(kind)
        return True

    def note(self, kind: str) -> None:
        """Count something that happened to the server, and that no rate controls."""
        self.injected[kind] += 1
        self.tell(kind)

    def stop(self) -> None:
        self.rates = {}
        self.loads_fail_until = 0.0


RATES = {
    "engine: death in a step": 0.01,
    "engine: death while loading": 0.1,
    "engine: hangs in a step": 0.006,
    "engine: stops between two steps": 0.01,
    "engine: hangs between two steps": 0.006,
    "engine: slow spawn": 0.3,
    "engine: answers no ping": 0.001,
    "engine: slow step": 0.02,
    "engine: step error": 0.005,
    "engine: message cut by its death": 0.5,
    "engine: cannot be started": 0.05,
    "engine: adapter cannot be read": 0.1,
    "worker: death in a job": 0.02,
    "worker: hangs in a job": 0.005,
    "worker: job exceeds its limits": 0.01,
    "worker: slow job": 0.02,
    "worker: cannot be started": 0.05,
    "download: cannot be started": 0.1,
    "download: death": 0.1,
    "download: hangs": 0.03,
    "download: failure": 0.1,
    "download: garbage": 0.05,
    "download: ends late": 0.5,
    "disk: slow job": 0.01,
    "disk: stalled job": 0.001,
    "disk: single error": 0.005,
    "disk: slow read of a model": 0.3,
    "disk: model cannot be read": 0.2,
}
"""The highest rate of each fault in a run."""


def draw(tell: Callable[[str], None]) -> Faults:
    """Choose which faults this run has. About half of the runs have few."""
    loop = world_loop()
    rates = {}
    for kind, most in RATES.items():
        share = (0.0, 0.0, 0.3, 1.0)[loop.choose(4, "data")]
        if share * most:
            rates[kind] = share * most
    return Faults(rates, tell)
