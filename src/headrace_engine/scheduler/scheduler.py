"""The scheduler's interface: accepts messages and step results, returns plans and outputs.

The scheduler is pure: time is an argument, and the scheduler does not know what tokens mean.
"""

from array import array
from collections import Counter
from collections.abc import Iterable

from headrace_common.config.settings import SchedulerConfig
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import (
    Cancel,
    Finished,
    FinishReason,
    NewSequence,
    Outputs,
    Status,
    StepTrace,
    Submit,
)
from headrace_common.plan import Elsewhere, EncoderInput, EncoderPiece, StepPlan, StepResult
from headrace_common.prefix import DiskNews, ReadSegment
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import Memory
from headrace_engine.memory.offers import Offer, Offers
from headrace_engine.scheduler.budget import Limits, TimeBudget
from headrace_engine.scheduler.commit import InFlight
from headrace_engine.scheduler.cost import StepShape
from headrace_engine.scheduler.guessing import MakeGuesser, own_guesser
from headrace_engine.scheduler.plan import Planner
from headrace_engine.scheduler.restores import Restores
from headrace_engine.scheduler.sequence import NO_INPUTS, Family, Sequence, source_inputs
from headrace_engine.scheduler.table import OutputBuffer, Quarantine, SequenceTable


class Scheduler:
    """Schedules sequences from their submission to their end; computes nothing itself."""

    def __init__(
        self,
        config: SchedulerConfig,
        layout: MemoryLayout,
        limits: Limits,
        disk: DiskPrefixes | None = None,
        make_guesser: MakeGuesser = own_guesser,
    ) -> None:
        self.max_model_len = limits.max_total(layout)
        # Whether several steps with only one sequence failed in a row. If so, a new engine
        # process should take over.
        self.must_exit = False
        self.memory = memory = Memory(layout, None if disk is None else Offers())
        self._patience = config.patience
        self._source = limits.source
        self._max_step_tokens = limits.max_step_tokens
        self._num_admitted = 0
        self._cancels: dict[SequenceId, FinishReason] = {}
        self._outputs = OutputBuffer()
        self._quarantine = quarantine = Quarantine()
        self._budget = budget = TimeBudget(limits)
        self._table = table = SequenceTable(memory, quarantine, self._outputs)
        self._restores = restores = Restores(disk, budget)
        self._planner = Planner(config, limits, table, memory, restores, budget, make_guesser)
        self._in_flight = InFlight(table, quarantine, memory, self._outputs, restores, budget)

    @property
    def is_idle(self) -> bool:
        """Return whether no sequence is left; outputs can still be pending."""
        return not self._table

    @property
    def has_work(self) -> bool:
        """Return whether plan() or take_outputs() may return something."""
        return bool(self._table) or self.has_outputs

    def rest_s(self, now: float) -> float | None:
        """Return the number of seconds for which plan() has nothing to do unless a message arrives.

        None means no limit.
        """
        if not self.has_work:
            return None
        if not self._planner.is_idle or (due := self._restores.due) is None:
            return 0.0
        return max(0.0, due - now)

    @property
    def has_outputs(self) -> bool:
        return not self._outputs.is_empty

    @property
    def missed(self) -> Counter[str]:
        """Return how often the stall target was missed, by cause."""
        return self._budget.missed

    @property
    def starved_s(self) -> float:
        """Return for how many seconds prompts have had only the guaranteed share of each step."""
        return self._budget.starved_s

    def take_outputs(self) -> Outputs | None:
        """Return the outputs since the last call; None if there are no outputs."""
        return self._outputs.take()

    def take_offers(self) -> list[Offer]:
        """Return the full blocks and states that were offered to the disk since the last call."""
        return [] if self.memory.offers is None else self.memory.offers.take()

    def take_reads(self) -> list[ReadSegment]:
        """Return the disk reads that were requested since the last call."""
        return self._restores.take_reads()

    def apply_news(self, news: DiskNews, now: float) -> None:
        """Apply a message from the disk threads: a finished read, or a list of stored segments."""
        self._restores.apply_news(news, now)

    def status(self) -> Status:
        waiting, num_running = list(self._table.waiting), len(self._table.running)
        return Status(
            num_running=num_running,
            num_waiting=len(self._table) - num_running,
            num_waiting_tokens=sum(sequence.num_tokens for sequence in waiting),
            blocks_free=self.memory.num_available,
            slots_free=self.memory.num_free_slots,
            num_steps=self._in_flight.num_steps,
            queue=tuple(sequence.id for sequence in waiting),
            prompt_tokens_per_s=self._budget.prompt_tokens_per_s,
            missed=dict(self.missed),
            num_preemptions=self._planner.num_preemptions,
            num_guessed=self._in_flight.num_guessed,
            num_accepted=self._in_flight.num_accepted,
            disk=dict(self._restores.hits),
            disk_misses=dict(self._restores.misses),
            num_drafted=self._in_flight.num_drafted,
            num_drafted_right=self._in_flight.num_drafted_right,
        )

    @property
    def decode_s(self) -> float:
        """Return the predicted seconds of the decode chunks in each step; 0 if not measured."""
        return self._budget.decode_s

    @property
    def has_streams(self) -> bool:
        """Return whether any running sequence is decoding."""
        return any(sequence.is_decoding for sequence in self._table.running)

    @property
    def has_prompts(self) -> bool:
        """Return whether any prompt still has to be processed."""
        return not all(sequence.is_decoding for sequence in self._table.running) or bool(
            self._table.waiting
        )

    def leave_room(self, elsewhere: Elsewhere) -> None:
        """Reserve time in later steps for the other engines on the same cores."""
        self._budget.leave_room(elsewhere)

    def observe(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that was timed before the first request.

        `chunks` holds a pair (context, new tokens) per chunk; one new token counts as decoding.
        The runner must have been warmed up before the timed step.
        """
        shape = StepShape()
        for context, new in chunks:
            shape.add(context, new, new > 1, self._budget.forwards > 0)
        self._budget.learn(shape, seconds)

    def observe_draft(self, context: int, num_read: int, num_chosen: int, seconds: float) -> None:
        """Learn from a timed use of the draft model, before the first request."""
        shape = StepShape()
        shape.draft(context, num_read, num_chosen)
        assert shape.drafted is not None
        self._budget.draft.observe(shape.drafted, seconds)

    def observe_encoding(self, work: EncoderInput, piece: EncoderPiece, seconds: float) -> None:
        """Learn from a piece of an encoding that was timed before the first request."""
        shape = StepShape()
        shape.encode(piece.stage.kind, piece.num_rows, work.size)
        self._budget.learn_encoding(shape, (seconds,))

    def count_missed(self, cause: str) -> None:
        """Count a stall that the engine causes before the next step."""
        self._budget.excuse(cause)

    def add(self, submit: Submit, now: float) -> None:
        """Admit all sequences of a submission; sequences that can never run end immediately.

        The choices of one prompt form a family, which processes the prompt once. Suspects of a
        failed step join no family, because each suspect runs alone.
        """
        families: dict[int, Family] = {}
        for new in submit.sequences:
            sequence = self._sequence(submit, new)
            outcome = self._outcome_before_any_step(sequence)
            if outcome is not None:
                self._outputs.finished.append(outcome)
                continue
            family = families.setdefault(new.prompt, Family(sequence))
            sequence.join(family, alone=submit.suspect)
            self._set_due(sequence)
            self._table.admit(sequence)
            if submit.suspect:
                self._quarantine.suspect(sequence, sequence.num_tokens)

    def _sequence(self, submit: Submit, new: NewSequence) -> Sequence:
        token_ids = array("i", submit.prompts[new.prompt])
        inputs = submit.inputs[new.prompt] if submit.inputs else NO_INPUTS
        if self._source is not None and token_ids:
            inputs = source_inputs(token_ids, self._source)
            token_ids = array("i", self._source.start_ids)
        num_prompt = len(token_ids)
        token_ids.frombytes(new.generated)
        max_total, max_tokens = self.max_model_len, submit.sampling.max_tokens
        if max_tokens is not None:
            max_total = min(num_prompt + max_tokens, max_total)
        self._num_admitted += 1
        return Sequence(
            id=new.sequence_id,
            token_ids=token_ids,
            num_prompt=num_prompt,
            choice=new.choice,
            sampling=submit.sampling,
            max_total=max_total,
            priority=submit.priority,
            client=submit.client,
            arrival=submit.arrival,
            number=self._num_admitted,
            chain=self.memory.chain(submit.salt, ((w.start, w.mark) for w in inputs.works)),
            uses_prefix_cache=submit.use_prefix,
            inputs=inputs,
            adapter=submit.adapter.fingerprint if submit.adapter else "",
            state=new.state,
        )

    def _outcome_before_any_step(self, sequence: Sequence) -> Finished | None:
        """Return the outcome if the sequence cannot run or is already complete; otherwise None."""
        if not sequence.num_prompt:
            message = "The prompt has no tokens; send at least one."
            return Finished(sequence.id, FinishReason.ERROR, "empty_prompt", message)
        longest = self.max_model_len - (sequence.sampling.max_tokens != 0)
        num_given = sequence.num_prompt
        # In an encoder-decoder model, the source does not use up the context of the answer.
        if self._source is not None:
            longest, num_given = self.max_model_len, sequence.num_shown
        if num_given > longest:
            message = (
                f"The prompt has {num_given} tokens, but the context of {self.max_model_len} "
                f"tokens has room for a prompt of {longest}; shorten the prompt."
            )
            return Finished(sequence.id, FinishReason.ERROR, "context_length_exceeded", message)
        longest_span = max((end - start for start, end in sequence.inputs.spans), default=0)
        if longest_span > self._max_step_tokens:
            message = (
                f"An image has {longest_span} tokens that must be processed in one step, but a "
                f"step is limited to {self._max_step_tokens} tokens; send a smaller image, or "
                "raise --max-step-tokens."
            )
            return Finished(sequence.id, FinishReason.ERROR, "image_too_large", message)
        reason = sequence.end_reason() if sequence.num_generated else None
        return Finished(sequence.id, reason) if reason else None

    def _set_due(self, sequence: Sequence) -> None:
        cached = self._table.match(sequence).num_tokens
        alone = self._budget.seconds_alone(cached, sequence.num_tokens - cached)
        alone += sum(self._budget.seconds_encoding(work) for work in sequence.inputs.works)
        sequence.set_due(alone, self._patience)

    def cancel(self, cancel: Cancel) -> None:
        """Record which sequences to end; the next plan ends these sequences."""
        for sequence_id in cancel.sequence_ids:
            if self._table.living(sequence_id) is not None:
                self._cancels.setdefault(sequence_id, cancel.finish)

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step; None if there is nothing to do before a commit or a message."""
        if self._cancels:
            self._apply_cancels()
        step = self._planner.plan(now, can_preempt=self._in_flight.is_empty)
        return None if step is None else self._in_flight.launch(step)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepTrace | None:
        """Apply the result of the oldest plan; return the step's trace if the step was timed."""
        return self._in_flight.commit(plan, result, now)

    def fail(self, plan: StepPlan, message: str, now: float) -> None:
        """Drop all plans in flight, because the oldest plan raised an exception.

        The sequences of all dropped plans wait again, and the sequences of the oldest plan become
        suspects. A sequence that was alone in the oldest plan ends with `message`.
        """
        self._in_flight.suspect(plan, message)
        self._in_flight.drop(now)
        self.must_exit = self._quarantine.is_hopeless

    def out_of_memory(self, plan: StepPlan, message: str, now: float) -> None:
        """Halve the token limit of steps and retry, because the oldest plan ran out of memory.

        The limit never falls below one block. If the limit cannot be halved again, the step
        counts as failed.
        """
        if not self._budget.halve_tokens(at_least=self.memory.layout.block_size):
            self._in_flight.suspect(plan, message)
        self._in_flight.drop(now)
        self.must_exit = self._quarantine.is_hopeless

    def _apply_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for sequence_id, finish in cancels.items():
            sequence = self._table.living(sequence_id)
            if sequence is not None:
                self._table.end(sequence, finish)
