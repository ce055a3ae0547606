"""Simulated placements of requests on replicas: `python -m stress.simulator.placements -n 10000`.

Conversations return with their history, and replicas die and return. Each prompt's cached prefix is
compared with the longest prefix in an unlimited cache.
"""

import argparse
import heapq
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.fleet.placement import Placement, PlacementRequest, PrefixRecord

NUM_REPLICAS, NUM_PLACES, LOAD = 4, 32, 0.7
# The number of blocks of each replica.
NUM_BLOCKS = 8000
SYSTEM_BLOCKS, TURN_BLOCKS, MAX_TURNS = 12, 8, 8
NUM_SYSTEM_PROMPTS, NUM_CONVERSATIONS = 6, 240
# How many slots a request takes; each entry is drawn with the same probability.
PLACES = (*[1] * 20, 2, 4, 8)
SECONDS_PER_BLOCK, SECONDS_PER_ANSWER = 0.006, 1.0
# One replica dies after every DEATH_EVERY placements and returns after DOWN_S seconds.
DEATH_EVERY, DOWN_S = 400, 3.0


class Outcome(NamedTuple):
    """How many cached blocks the placements and the oracle found, and how long requests waited."""

    num_placed: int
    num_hit: int
    num_oracle: int
    longest_wait_s: float
    num_deaths: int
    # The average fraction of slots that were in use.
    load: float

    def __str__(self) -> str:
        share = self.num_hit / max(1, self.num_oracle)
        return (
            f"{self.num_placed} placements, {self.num_deaths} deaths: {share:.1%} of the oracle's "
            f"prefix hits at {self.load:.0%} load, longest wait {self.longest_wait_s:.1f} s"
        )


@dataclass
class _Asked:
    names: tuple[int, ...]
    num_places: int
    came: float
    talk: int
    seconds: float = 0.0
    # How often the request was placed. An older placement's end is ignored.
    life: int = 0


@dataclass
class _Talk:
    names: tuple[int, ...]
    num_turns: int = 0


@dataclass
class _Model:
    """The real state of the engines, to compare with what the placement assumes."""

    caches: dict[int, PrefixRecord] = field(default_factory=dict)
    running: dict[int, set[int]] = field(default_factory=dict)
    oracle: PrefixRecord = field(default_factory=lambda: PrefixRecord(1 << 60))


class Simulation:
    """One run. Raises AssertionError if a request is placed twice, overtaken or forgotten."""

    def __init__(self, number: int, seed: int, with_deaths: bool = True) -> None:
        self._number, self._with_deaths = number, with_deaths
        self._random = random.Random(seed)
        self._names = itertools.count()
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int, int]] = []
        self._placement = Placement()
        self._model = _Model()
        self._asked: dict[int, _Asked] = {}
        self._systems = [self._new(SYSTEM_BLOCKS) for _ in range(NUM_SYSTEM_PROMPTS)]
        self._talks = [self._new_talk() for _ in range(NUM_CONVERSATIONS)]
        self._resting = set(range(NUM_CONVERSATIONS))
        self._num_asked = self._num_placed = self._num_hit = self._num_oracle = 0
        self._num_deaths = 0
        self._longest_wait = self._place_s = 0.0

    def run(self) -> Outcome:
        for replica in range(NUM_REPLICAS):
            self._open(replica)
        self._at(0.0, "come", 0)
        now = 0.0
        while self._events:
            now, _, kind, number, life = heapq.heappop(self._events)
            if kind == "come":
                self._come(now)
            elif kind == "end":
                self._end(now, number, life)
            elif kind == "up":
                self._open(number)
            self._place(now)
        assert not self._placement.waiting() and not self._asked, "a request was forgotten"
        assert not any(self._model.running.values())
        taken = [self._placement.num_taken(replica) for replica in range(NUM_REPLICAS)]
        assert not any(taken), taken
        assert self._num_placed >= self._number
        hits, load = (self._num_hit, self._num_oracle), self._place_s / now
        load /= NUM_REPLICAS * NUM_PLACES
        return Outcome(self._num_placed, *hits, self._longest_wait, self._num_deaths, load)

    def _at(self, when: float, kind: str, number: int, life: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), kind, number, life))

    def _new(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._names) for _ in range(number))

    def _new_talk(self) -> _Talk:
        return _Talk(self._random.choice(self._systems) + self._new(TURN_BLOCKS))

    def _open(self, replica: int) -> None:
        self._placement.open(replica, NUM_PLACES, NUM_BLOCKS)
        self._model.caches[replica] = PrefixRecord(NUM_BLOCKS)
        self._model.running[replica] = set()

    def _come(self, now: float) -> None:
        """Sends the next request of an idle conversation, or starts one if all are busy."""
        self._num_asked += 1
        if self._resting:
            number = self._random.choice(sorted(self._resting))
            self._resting.discard(number)
        else:
            number = len(self._talks)
            self._talks.append(self._new_talk())
        talk = self._talks[number]
        if talk.num_turns == MAX_TURNS:
            talk = self._talks[number] = self._new_talk()
        num_places = self._random.choice(PLACES)
        asked = _Asked(talk.names, num_places, now, number)
        self._asked[self._num_asked] = asked
        self._ask(self._num_asked)
        if self._num_asked < self._number:
            usual = SECONDS_PER_ANSWER + SECONDS_PER_BLOCK * 1.2 * TURN_BLOCKS
            rate = LOAD * NUM_REPLICAS * NUM_PLACES * len(PLACES) / (sum(PLACES) * usual)
            self._at(now + self._random.expovariate(rate), "come", 0)

    def _ask(self, part: int) -> None:
        asked = self._asked[part]
        want = PlacementRequest(asked.num_places, len(asked.names) + 1, asked.names, asked.came)
        self._placement.ask(part, want)

    def _place(self, now: float) -> None:
        while True:
            line = self._placement.waiting()
            if (placed := self._placement.next()) is None:
                return
            part, replica, _ = placed
            assert part == line[0], "a request was overtaken"
            asked, model = self._asked[part], self._model
            assert not any(part in others for others in model.running.values()), "placed twice"
            model.running[replica].add(part)
            taken = sum(self._asked[one].num_places for one in model.running[replica])
            assert taken <= NUM_PLACES, f"{taken} of {NUM_PLACES} places"
            hit = model.caches[replica].num_shared(asked.names)
            self._num_placed += 1
            self._num_hit += hit
            self._num_oracle += model.oracle.num_shared(asked.names)
            self._longest_wait = max(self._longest_wait, now - asked.came)
            asked.life += 1
            seconds = SECONDS_PER_BLOCK * (len(asked.names) - hit)
            seconds += self._random.expovariate(1 / SECONDS_PER_ANSWER)
            self._place_s += seconds * asked.num_places
            self._at(now + seconds, "end", part, asked.life)
            if self._with_deaths and self._num_placed % DEATH_EVERY == 0:
                self._die(now, self._random.randrange(NUM_REPLICAS))

    def _die(self, now: float, replica: int) -> None:
        if replica not in self._model.running:
            return
        self._num_deaths += 1
        lost = self._placement.close(replica)
        assert set(lost) == self._model.running.pop(replica)
        for part in lost:
            self._asked[part].life += 1
            self._ask(part)
        self._at(now + DOWN_S, "up", replica)

    def _end(self, now: float, part: int, life: int) -> None:
        asked = self._asked.get(part)
        if asked is None or asked.life != life:
            return
        replica = self._placement.replica_of(part)
        assert replica is not None
        for _ in range(asked.num_places):
            self._placement.release(part)
        self._model.running[replica].remove(part)
        del self._asked[part]
        talk = self._talks[asked.talk]
        # The history includes the answer.
        said = asked.names + self._new(TURN_BLOCKS)
        for cache in (self._model.caches[replica], self._model.oracle):
            cache.note(said)
        talk.names = said + self._new(TURN_BLOCKS)
        talk.num_turns += 1
        if asked.talk < NUM_CONVERSATIONS:
            self._resting.add(asked.talk)


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.simulator.placements", description=__doc__)
    parser.add_argument("-n", type=int, default=10_000, help="number of requests in a run")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument(
        "--runs", type=int, default=4, help="number of runs; in every second run replicas die"
    )
    options = parser.parse_args()
    began, seen = time.monotonic(), Counter[str]()
    for seed in range(options.first, options.first + options.runs):
        outcome = Simulation(options.n, seed, with_deaths=seed % 2 == 1).run()
        print(f"seed {seed}: {outcome}", flush=True)
        seen["too few hits"] += not seed % 2 and outcome.num_hit < 0.9 * outcome.num_oracle
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if seen["too few hits"] else 0


if __name__ == "__main__":
    sys.exit(main())
