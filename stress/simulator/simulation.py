"""Runs one schedule from its seed: real scheduler, fake runner, faults and a virtual clock."""

from array import array
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import msgspec

from headrace_common.messages import Cancel, FinishReason, Outputs, Submit
from headrace_common.plan import StepPlan
from headrace_engine.scheduler.scheduler import Scheduler
from stress.simulator.clients import Clients, Heard
from stress.simulator.fake_disk import FakeDisk
from stress.simulator.fake_runner import FakeRunner
from stress.simulator.guesser import MadeUp
from stress.simulator.invariants import Invariants
from stress.simulator.scenario import Scenario, make_scenario

# Every step has the same probability of a death, and each death restarts the prompts. In steps of
# one token, two long prompts would hardly ever finish between two deaths. So deaths stop at this
# step: if a schedule still does not end, the scheduler is at fault.
LAST_DEATH = 1000


class Violation(AssertionError):
    """Raised if an invariant does not hold; the message contains the seed that shows it."""


@dataclass
class Run:
    """The counts and the digest of a schedule's steps."""

    num_steps: int
    num_preempted: int
    num_guessed: int
    # Tokens that were restored from disk.
    num_restored: int
    digest: int


class Engine(NamedTuple):
    """One life of an engine: the state that is lost when the engine dies."""

    scheduler: Scheduler
    runner: FakeRunner
    invariants: Invariants
    in_flight: deque[StepPlan]


def run_seed(seed: int) -> Run:
    """Run the schedule of a seed; raise Violation if an invariant does not hold."""
    simulation = None
    try:
        simulation = Simulation(make_scenario(seed))
        return simulation.run()
    except Exception as error:
        steps = simulation.num_steps if simulation else 0
        raise Violation(f"seed {seed}, step {steps}: {type(error).__name__}: {error}") from error


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.num_steps = 0
        self._rng = Random(scenario.seed + 1)
        self._now = 0.0
        self._submits = deque(scenario.submits)
        self._cancels = deque(scenario.cancels)
        # Requested cancellations; the next plan acts on them.
        self._cancelled: set[int] = set()
        # Sequences that failed in a step without other sequences.
        self._may_fail: set[int] = set()
        self._ever_cancelled: set[int] = set()
        self._digest = 0
        self._num_preempted = self._num_guessed = 0
        self._salts: dict[int, str] = {}
        self._num_restored = 0
        self._disk: FakeDisk | None = None
        if scenario.disk is not None:
            self._disk = FakeDisk(scenario.disk, scenario.layout, scenario.seed + 4)
        self._engine = self._new_engine()
        self._clients = Clients(self._engine.scheduler.max_model_len)

    def _new_engine(self) -> Engine:
        scenario = self.scenario
        view = None if self._disk is None else self._disk.view()
        scheduler = Scheduler(
            scenario.config,
            scenario.layout,
            scenario.limits,
            view,
            lambda sequence: MadeUp(sequence, scenario),
        )
        runner = FakeRunner(scenario.layout, self._salts)
        if self._disk is not None:
            self._disk.connect(scheduler.memory, runner.copy_out)
        return Engine(scheduler, runner, Invariants(scheduler, scenario), deque())

    def run(self) -> Run:
        bound = self._step_bound()
        while self._submits or not self._engine.scheduler.is_idle:
            self._deliver()
            is_planned = len(self._engine.in_flight) < self.scenario.depth and self._plan()
            if not is_planned and not self._finish_oldest():
                self._wait()
            assert self.num_steps <= bound, "too many steps"
        self._check_ends()
        counts = self._num_preempted, self._num_guessed, self._num_restored
        return Run(self.num_steps, *counts, self._digest)

    def _step_bound(self) -> int:
        """Return the largest number of steps that the schedule may take.

        The limit is generous, but a livelock soon exceeds it.
        """
        tokens = 0
        for submit in self.scenario.submits:
            most = submit.sampling.max_tokens
            answer = 200 if most is None else most
            prompts = sum(len(p) // 4 for p in submit.prompts)
            units = sum(work.num_units for each in submit.inputs for work in each.works)
            tokens += len(submit.sequences) * (min(prompts, 2000) + answer + 10 + units)
        return 500 + 20 * tokens

    def _deliver(self) -> None:
        """Delivers the messages that are due, in the order of their times."""
        engine = self._engine
        while self._submits and self._submits[0].arrival <= self._now:
            submit = self._submits.popleft()
            self._salts.update((new.sequence_id, submit.salt) for new in submit.sequences)
            self._clients.submit(submit)
            engine.scheduler.add(submit, self._now)
            engine.invariants.after_any_call()
        while self._cancels and self._cancels[0][0] <= self._now:
            cancel = self._cancels.popleft()[1]
            engine.scheduler.cancel(cancel)
            known = [i for i in cancel.sequence_ids if i in self._clients.heard]
            self._cancelled.update(known)
            self._ever_cancelled.update(known)
            engine.invariants.after_any_call()

        if self._disk is not None:
            self._disk.take_offers(self._now)
            for news in self._disk.news(self._now):
                engine.scheduler.apply_news(news, self._now)
                engine.invariants.after_any_call()

    def _plan(self) -> bool:
        engine = self._engine
        before = engine.invariants.before_plan(self._cancelled)
        plan = engine.scheduler.plan(self._now)
        self._cancelled.clear()
        engine.invariants.after_any_call()
        engine.invariants.after_plan(plan, before, self._now)
        self._clients.take(engine.scheduler.take_outputs() or Outputs())
        for wish in engine.scheduler.take_reads():
            assert self._disk is not None
            self._disk.ask(wish, self._now)
        num_preempted = sum(s.lease is None and s.outcome is None for s in before.running)
        self._num_preempted += num_preempted
        if plan is None:
            stuck = not engine.in_flight and not engine.scheduler.is_idle
            is_reading = bool(engine.scheduler.rest_s(self._now))
            assert not stuck or is_reading or num_preempted, "no plan although sequences wait"
            return False
        engine.in_flight.append(plan)
        self._num_restored += sum(load.end - load.start for load in plan.loads)
        loads = [(load.sequence_id, load.start, load.end) for load in plan.loads]
        chunks = [(c.sequence_id, c.start, c.length, c.draws) for c in plan.chunks]
        self._num_guessed += sum(len(c.guess) for c in plan.chunks)
        pieces = [(c.sequence_id, c.work, c.start, c.end) for c in plan.encoded]
        blocks = [tuple(c.block_ids) for c in plan.chunks[:1]]
        self._digest = hash((self._digest, *chunks, *pieces, *blocks, *loads))
        return True

    def _wait(self) -> None:
        """Advances the clock to the next message, or to the time at which a read is too late."""
        times = [self._submits[0].arrival] if self._submits else []
        rest_s = self._engine.scheduler.rest_s(self._now)
        if rest_s == 0:
            # The next plan has something to do.
            return
        if self._disk is not None and rest_s is not None:
            times.append(self._now + rest_s + 1e-9)
            times += [] if self._disk.next_at is None else [self._disk.next_at]
        self._now = max(self._now, min(times)) if times else self._now

    def _finish_oldest(self) -> bool:
        """Ends the oldest plan in flight: it succeeds, fails, or the engine dies."""
        engine = self._engine
        if not engine.in_flight:
            return False
        self.num_steps += 1
        plan = engine.in_flight[0]
        faults = self.scenario.faults
        seconds = self._seconds(plan)
        if self._rng.random() < faults.death and self.num_steps < LAST_DEATH:
            self._die(plan)
            return True
        self._now += seconds[0] + sum(seconds[1])
        if self._rng.random() < faults.out_of_memory:
            self._note_alone(plan)
            engine.scheduler.out_of_memory(plan, "out of memory", self._now)
            engine.in_flight.clear()
        elif self._fails(plan):
            self._note_alone(plan)
            engine.scheduler.fail(plan, "it broke", self._now)
            engine.in_flight.clear()
        else:
            engine.invariants.before_commit(seconds[0])
            result = engine.runner.execute(plan, seconds, faults.row_error_at)
            engine.in_flight.popleft()
            engine.scheduler.commit(plan, result, self._now)
        self._clients.take(engine.scheduler.take_outputs() or Outputs())
        engine.invariants.after_any_call()
        if engine.scheduler.must_exit:
            self._die(None)
        return True

    def _fails(self, plan: StepPlan) -> bool:
        if self._rng.random() < self.scenario.faults.step_error:
            return True
        return not self.scenario.faults.poisoned.isdisjoint(plan.named)

    def _note_alone(self, plan: StepPlan) -> None:
        if len(plan.named) == 1:
            self._may_fail.update(plan.named)

    def _seconds(self, plan: StepPlan) -> tuple[float, tuple[float, ...]]:
        """Return how many seconds a step computes, and how many seconds each piece encodes."""
        computing = 0.01 + sum(
            1e-6 * c.start + 1e-3 * c.length + 1e-8 * c.length * (2 * c.start + c.length)
            for c in plan.chunks
        )
        encoding = []
        for chunk in plan.encoded:
            work = self._engine.scheduler._table[chunk.sequence_id].inputs.works[chunk.work]
            num_rows = sum(piece.num_rows for piece in work.pieces(chunk.start, chunk.end))
            encoding.append(2e-3 + num_rows * (1e-4 + 1e-7 * work.size))
        factor = self._rng.uniform(0.95, 1.05)
        factor *= 20 if self._rng.random() < self.scenario.faults.slow_step else 1
        return computing * factor, tuple(seconds * factor for seconds in encoding)

    def _die(self, plan: StepPlan | None) -> None:
        """Replaces the engine; the new engine gets the unfinished sequences with their tokens."""
        suspects = set(plan.named) if plan is not None else set()
        self._now += 0.5
        self._engine = self._new_engine()
        self._clients.engine_died()
        self._cancelled.clear()
        for heard in self._clients.unfinished():
            self._engine.scheduler.add(self._again(heard, suspects), self._now)
            if heard.new.sequence_id in self._ever_cancelled:
                self._cancels.appendleft((self._now, self._cancel_again(heard)))
        self._clients.take(self._engine.scheduler.take_outputs() or Outputs())
        self._engine.invariants.after_any_call()

    def _cancel_again(self, heard: Heard) -> Cancel:
        for _, cancel in self.scenario.cancels:
            if heard.new.sequence_id in cancel.sequence_ids:
                return cancel
        raise AssertionError("cancelled without a request to cancel")

    def _again(self, heard: Heard, suspects: set[int]) -> Submit:
        tokens = msgspec.structs.replace(heard.new, generated=array("i", heard.tokens).tobytes())
        is_suspect = heard.new.sequence_id in suspects
        return msgspec.structs.replace(heard.submit, sequences=(tokens,), suspect=is_suspect)

    def _check_ends(self) -> None:
        """Checks that each sequence ended once, with the tokens that it has when it runs alone.

        Only a sequence that was hit by a fault may end in another way.
        """
        faults = self.scenario.faults
        for sequence_id, heard in self._clients.heard.items():
            assert heard.end is not None, f"{sequence_id} never ended"
            refusals = ("empty_prompt", "context_length_exceeded", "image_too_large")
            is_impossible = heard.end.code in refusals
            assert is_impossible == self._is_impossible(heard)
            tokens, finish = heard.expected()
            assert heard.tokens == tokens[: len(heard.tokens)], (
                f"{sequence_id} has different tokens than alone"
            )
            if is_impossible:
                continue
            if heard.end.finish is FinishReason.ERROR:
                row = faults.row_error_at.get(sequence_id)
                is_row_error = row is not None and len(heard.tokens) == row
                assert is_row_error or sequence_id in self._may_fail, (
                    f"{sequence_id} failed without a fault"
                )
            elif heard.tokens != tokens or heard.end.finish is not finish:
                assert sequence_id in self._ever_cancelled, f"{sequence_id} ended too early"

    def _is_impossible(self, heard: Heard) -> bool:
        length = len(heard.prompt)
        longest = heard.max_total - (heard.submit.sampling.max_tokens != 0)
        inputs = heard.submit.inputs
        spans = inputs[heard.new.prompt].spans if inputs else ()
        cap = self.scenario.limits.max_step_tokens
        return length == 0 or length > longest or any(e - s > cap for s, e in spans)
