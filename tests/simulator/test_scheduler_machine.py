"""Any order of calls on a scheduler keeps its invariants, and everything ends."""

from array import array
from collections import deque

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from headrace.config.settings import SchedulerConfig
from headrace.core.ids import SequenceId, StreamId
from headrace.core.layout import MemoryLayout
from headrace.core.messages import Cancel, FinishReason, NewSequence, Submit
from headrace.core.plan import StepPlan
from headrace.core.sampling import Sampling
from headrace.scheduler.budget import Limits
from headrace.scheduler.scheduler import Scheduler
from stress.simulator.clients import Clients
from stress.simulator.fake_runner import FakeRunner
from stress.simulator.invariants import Invariants
from stress.simulator.scenario import END_TOKEN, Faults, Scenario

DEPTH = 2
LAYOUTS = [
    MemoryLayout(2, 12),
    MemoryLayout(2, 12, 3, 2, snapshot_every=4),
    MemoryLayout(num_slots=3, max_positions=24),
]
PROMPTS = st.lists(st.integers(3, 4), min_size=0, max_size=14)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.cancelled: set[int] = set()
        self.in_flight: deque[StepPlan] = deque()
        self.salts: dict[int, str] = {}
        self.open(LAYOUTS[0], 4)

    def open(self, layout: MemoryLayout, cap: int) -> None:
        limits = Limits(max_num_seqs=3, max_step_tokens=cap, max_model_len=24, max_stall_s=0.1)
        config = SchedulerConfig(max_open_prompts=2)
        scenario = Scenario(0, layout, limits, config, DEPTH, [], [], Faults())
        self.scheduler = Scheduler(config, layout, limits)
        self.runner = FakeRunner(layout, self.salts)
        self.watch = Invariants(self.scheduler, scenario)
        self.clients = Clients(self.scheduler.max_model_len)

    @precondition(lambda self: not self.number)
    @rule(layout=st.sampled_from(LAYOUTS), cap=st.sampled_from([1, 3, 8]))
    def choose(self, layout, cap):
        self.open(layout, cap)

    @rule(
        prompt=PROMPTS,
        num_choices=st.integers(1, 3),
        max_tokens=st.sampled_from([0, 1, 4, None]),
        priority=st.integers(-1, 1),
        suspect=st.booleans(),
    )
    def add(self, prompt, num_choices, max_tokens, priority, suspect):
        news = [NewSequence(SequenceId(self.number + k), 0, k) for k in range(num_choices)]
        self.number += num_choices
        submit = Submit(
            StreamId(str(self.number)),
            (array("i", prompt).tobytes(),),
            tuple(news),
            Sampling(max_tokens=max_tokens, seed=self.number, end_token_ids=(END_TOKEN,)),
            self.now,
            priority=priority,
        )
        self.salts.update((new.sequence_id, "") for new in news)
        self.clients.submit(submit)
        self.scheduler.add(msgspec.structs.replace(submit, suspect=suspect), self.now)
        self.watch.after_any_call()

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def cancel(self, data):
        sequence_id = SequenceId(data.draw(st.integers(0, self.number)))
        self.cancelled.add(sequence_id)
        self.scheduler.cancel(Cancel((sequence_id,), FinishReason.CANCELLED))

    @rule(seconds=st.sampled_from([0.01, 1.0]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: len(self.in_flight) < DEPTH)
    @rule()
    def plan(self):
        before = self.watch.before_plan(self.cancelled)
        plan = self.scheduler.plan(self.now)
        self.watch.after_any_call()
        self.watch.after_plan(plan, before, self.now)
        self.cancelled.clear()
        self.clients.take(self.scheduler.take_outputs())
        if plan is not None:
            self.in_flight.append(plan)
        elif not self.in_flight:
            assert self.scheduler.is_idle

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self):
        plan = self.in_flight.popleft()
        self.now += 0.02
        self.scheduler.commit(plan, self.runner.execute(plan, (0.02, 0.0), {}), self.now)
        self.clients.take(self.scheduler.take_outputs())
        self.watch.after_any_call()

    @precondition(lambda self: self.in_flight)
    @rule(is_memory=st.booleans())
    def fail(self, is_memory):
        fail = self.scheduler.out_of_memory if is_memory else self.scheduler.fail
        fail(self.in_flight[0], "it broke", self.now)
        self.in_flight.clear()
        self.clients.take(self.scheduler.take_outputs())
        self.watch.after_any_call()

    def teardown(self):
        for _ in range(5000):
            if self.in_flight:
                self.commit()
            else:
                self.plan()
            if self.scheduler.is_idle and not self.in_flight:
                break
        assert self.scheduler.is_idle
        assert not self.clients.unfinished()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
