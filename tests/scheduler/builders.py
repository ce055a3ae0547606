"""Builds schedulers and requests, and runs steps with a runner that draws counting tokens."""

from array import array

import msgspec

from headrace_common.config.settings import SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import (
    Cancel,
    FinishReason,
    NewSequence,
    Outputs,
    StepTrace,
    Submit,
)
from headrace_common.plan import Chunk, ChunkResult, Drawn, StepPlan, StepResult
from headrace_common.sampling import Sampling
from headrace_engine.scheduler.budget import Limits
from headrace_engine.scheduler.cost import StepShape
from headrace_engine.scheduler.guessing import MakeGuesser, own_guesser
from headrace_engine.scheduler.scheduler import Scheduler

END_TOKEN = 2


def packed(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


LIMITS = Limits.__struct_fields__


def make_limits(**fields: object) -> Limits:
    defaults = {"max_num_seqs": 64, "max_step_tokens": 512, "max_model_len": 100_000}
    return Limits(**{**defaults, **fields})


def make_scheduler(
    num_blocks: int = 1000,
    *,
    num_slots: int = 0,
    num_snapshots: int = 0,
    make_guesser: MakeGuesser = own_guesser,
    **fields: object,
) -> Scheduler:
    """Return a scheduler. `fields` are fields of Limits or SchedulerConfig."""
    layout = MemoryLayout(16, num_blocks, num_slots, num_snapshots, snapshot_every=64)
    limits = {name: fields.pop(name) for name in list(fields) if name in LIMITS}
    config = SchedulerConfig(**fields)
    return Scheduler(config, layout, make_limits(**limits), make_guesser=make_guesser)


def shape_of(decoders: list[int], prompts: list[tuple[int, int]]) -> StepShape:
    """Return the shape of a step.

    `decoders` has the contexts of decode chunks, `prompts` contexts and lengths of prompt chunks.
    """
    shape = StepShape()
    for context in decoders:
        shape.add(context, 1, is_prompt=False, forward_per_chunk=False)
    for context, new in prompts:
        shape.add(context, new, is_prompt=True, forward_per_chunk=False)
    return shape


def make_submit(
    number: int, length: int, *, max_tokens: int | None = 5, generated: int = 0, **fields: object
) -> Submit:
    """Return a request for one sequence. Each number has a different prompt."""
    sampling = fields.pop("sampling", None) or Sampling(
        max_tokens=max_tokens, end_token_ids=(END_TOKEN,)
    )
    new = NewSequence(SequenceId(number), 0, 0, packed([7] * generated))
    fields = {"arrival": float(number), **fields}
    prompt = packed([1000 + number] * length)
    return Submit(StreamId(str(number)), (prompt,), (new,), sampling, **fields)


def make_family(number: int, length: int, **fields: object) -> Submit:
    """Return a request for `number` choices of one prompt, with ids from 0."""
    submit = make_submit(0, length, **fields)
    news = tuple(NewSequence(SequenceId(i), 0, i) for i in range(number))
    return msgspec.structs.replace(submit, sequences=news)


def cancel(number: int, finish: FinishReason = FinishReason.CANCELLED) -> Cancel:
    return Cancel((SequenceId(number),), finish)


def lengths(plan: StepPlan | None) -> list[int]:
    return [chunk.length for chunk in plan.chunks] if plan else []


def sequence_ids(plan: StepPlan | None) -> list[int]:
    return [chunk.sequence_id for chunk in plan.chunks] if plan else []


class Engine:
    """Runs the loop of an engine with a scheduler. Keeps all outputs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.progress: dict[int, list[int]] = {}
        self.finished: dict[int, tuple[str, str]] = {}
        self.outputs: list[Outputs] = []
        # The trace of the last step.
        self.trace: StepTrace | None = None

    def add(self, *submits: Submit) -> "Engine":
        for submit in submits:
            self.scheduler.add(submit, self.now)
        return self

    def step(self, seconds: float = 0.01, errors: dict[int, str] | None = None) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        self.take()
        if plan is not None:
            self.commit(plan, seconds, errors)
        return plan

    def commit(
        self, plan: StepPlan, seconds: float = 0.01, errors: dict[int, str] | None = None
    ) -> None:
        self.now += seconds
        encode_seconds = (1e-9,) * len(plan.encoded)
        drawn = tuple(self._draw(c, errors or {}) for c in plan.chunks)
        result = StepResult(drawn, seconds, encode_seconds)
        self.trace = self.scheduler.commit(plan, result, self.now)
        self.take()

    def fail(self, message: str = "it broke") -> StepPlan:
        """Plan a step and report its failure."""
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        self.scheduler.fail(plan, message, self.now)
        self.take()
        return plan

    def run(self, max_steps: int = 1000) -> list[StepPlan]:
        """Run steps until the scheduler is idle. Return their plans."""
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) <= max_steps
        assert self.scheduler.is_idle
        self.scheduler.memory.check()
        return plans

    def take(self) -> None:
        outputs = self.scheduler.take_outputs() or Outputs()
        self.outputs.append(outputs)
        for started in outputs.started:
            self.progress[started.sequence_id] = [started.cached]
        for progress in outputs.progress:
            self.progress[progress.sequence_id].append(progress.processed)
        for token in outputs.tokens:
            self.tokens.setdefault(token.sequence_id, []).append(token.token_id)
        for end in outputs.finished:
            assert end.sequence_id not in self.finished
            self.finished[end.sequence_id] = (end.finish, end.code)

    def _draw(self, chunk: Chunk, errors: dict[int, str]) -> ChunkResult:
        drawn = [
            Drawn(error=errors[i]) if i in errors else Drawn((100 + chunk.start + chunk.length,))
            for i in chunk.draws
        ]
        return ChunkResult(tuple(drawn))
