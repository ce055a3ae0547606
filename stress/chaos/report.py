"""Collects the findings of a run: totals, and a timeline for each violation."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from stress.chaos.times import Gap, longest_gap, resume_times, token_times
from stress.compare import KINDS, Violation
from stress.site import Death
from stress.story import Story

MAX_GAP_S = 15.0
_MAX_SHOWN = 10


class Report:
    """Collects clients' requests as they end.

    Violations are printed immediately, because a run may be long.
    """

    def __init__(self, seed: int, late_s: float, say: Callable[[str], None]) -> None:
        self.seed = seed
        self.began = time.monotonic()
        self.violations: list[tuple[Violation, Story | None]] = []
        self.num_tokens = 0
        self.num_stories: Counter[str] = Counter()
        self.longest_gap = Gap(0.0, 0.0)
        self.longest_gap_at = ""
        self.lags: list[tuple[float, float]] = []
        self.num_late = 0
        self.facts: dict[str, int] = {}
        self._say = say
        # Silences longer than this are counted.
        self._late_s = late_s
        self._resumes: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, story: Story, found: Sequence[Violation], deaths: Sequence[Death]) -> None:
        """Adds a request that has ended, and the violations that the oracle found in it."""
        for violation in found:
            self._note(violation, story, deaths)
        self.num_stories[story.outcome] += 1
        self.num_tokens += story.question.num_tokens if story.outcome == "finished" else 0
        for made in story.exchanges:
            gap = longest_gap(made, self.lags)
            self.num_late += gap.seconds > self._late_s
            if gap > self.longest_gap:
                self.longest_gap = gap
                self.longest_gap_at = f"{gap.began - self.began:.3f} {story.label} {made.line()}"
            if gap.seconds > MAX_GAP_S:
                what = f"{gap.seconds:.1f} s without a byte: {made.line()}"
                self._note(Violation("silent", 1, what), story, deaths)
        mine = [death for death in deaths if death.at > story.began]
        for what, seconds in resume_times(token_times(story), mine):
            self._resumes[what.partition(" ")[0]].append(seconds)

    def fail(self, kind: str, what: str) -> None:
        """Reports a violation that was not caused by one particular request."""
        self._note(Violation(kind, 1, what), None, ())

    def _note(self, violation: Violation, story: Story | None, deaths: Sequence[Death]) -> None:
        self.violations.append((violation, story))
        if len(self.violations) <= _MAX_SHOWN:
            self._say("\n".join(self._timeline(violation, story, deaths)))

    def text(self) -> str:
        """Return the totals of the whole run."""
        sums = Counter[str]()
        for violation, _ in self.violations:
            sums[violation.kind] += violation.number
        ended = ", ".join(f"{n} {outcome}" for outcome, n in self.num_stories.most_common())
        lines = [
            f"seed {self.seed}, {time.monotonic() - self.began:.0f} s",
            ", ".join(f"{number} {name}" for name, number in self.facts.items()),
            f"{self.num_tokens} tokens in finished answers; requests: {ended}",
            ", ".join(f"{sums[kind]} {kind}" for kind in KINDS),
            *self._resume_lines(),
            f"longest data gap {self.longest_gap.seconds:.2f} s, {self.num_late} over "
            f"{self._late_s:.2f} s; delay of the proxy itself: at most "
            f"{max((lag for _, lag in self.lags), default=0.0):.2f} s",
            f"longest at {self.longest_gap_at}",
            self._verdict(),
        ]
        return "\n".join(lines)

    def _resume_lines(self) -> list[str]:
        return [
            f"from the end of {what} to a stream's next token: "
            f"p50 {statistics.median(times):.2f} s, "
            f"p99 {sorted(times)[int(len(times) * 0.99)]:.2f} s, longest {max(times):.2f} s, "
            f"{len(times)} times"
            for what, times in sorted(self._resumes.items())
        ]

    def _verdict(self) -> str:
        if self.violations:
            return f"{len(self.violations)} violations"
        bound = 3 / max(self.num_tokens, 1)
        return (
            f"0 violations in {self.num_tokens} tokens: "
            f"a share below {bound:.1e} at 95 % confidence"
        )

    def _timeline(
        self, violation: Violation, story: Story | None, deaths: Sequence[Death]
    ) -> list[str]:
        lines = [f"VIOLATION {violation.kind} ({violation.number}): {violation.what}"]
        if story is not None:
            told = story.lines() + [(d.at, f"*** {d.what} ended") for d in deaths]
            told = [(at, text) for at, text in told if at >= story.began]
            lines += [f"  {at - self.began:8.3f} {text}" for at, text in sorted(told)[:60]]
        return lines
