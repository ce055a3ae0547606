"""One choice being generated, as a few integers; never its text, never what memory contains."""

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from headrace_common.ids import SequenceId
from headrace_common.messages import Finished, FinishReason
from headrace_common.plan import EncodeWork, PromptInputs, SourceSpec
from headrace_common.request import BACKGROUND
from headrace_common.sampling import Sampling
from headrace_engine.memory.memory import Lease
from headrace_engine.memory.prefix import NameChain
from headrace_engine.scheduler.guess import Guess, Guesser

NO_INPUTS = PromptInputs()
EVERY_TOKEN = 1 << 40
PRIORITY_LEVEL_S = 10.0  # what one level of priority is worth
TURN_S = 1.0  # what a start counts for in its client's share, beside its prompt
by_id = attrgetter("id")
by_key = attrgetter("key")
by_rank = attrgetter("rank")


def due_time(arrival: float, patience: float, alone: float, priority: int) -> float:
    """When a prompt that takes `alone` seconds by itself should have its turn.

    Long prompts are due later, but at a fixed time, so they age without a clock.
    """
    return arrival + patience * alone + PRIORITY_LEVEL_S * priority


def source_inputs(token_ids: "array[int]", spec: SourceSpec) -> PromptInputs:
    """The inputs of an answer that is drawn from a source of these tokens."""
    work = EncodeWork(
        start=0,
        end=EVERY_TOKEN,
        size=len(token_ids),
        num_units=spec.num_units,
        is_whole=not spec.can_be_cut,
        is_source=True,
        data=token_ids.tobytes(),
    )
    return PromptInputs((work,))


class DueWork(NamedTuple):
    """A sequence's work number `number`, planned up to unit `start`."""

    number: int
    work: EncodeWork
    start: int


class SequenceStatus(enum.Enum):
    """Everything else about a sequence follows from its numbers."""

    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # holds a lease
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens [0, num_computed) are in memory, [0, num_planned) will be when launched plans end.

    Others read its fields; only its methods write them.
    """

    id: SequenceId
    token_ids: "array[int]"  # the prompt, then every token sampled so far
    num_prompt: int
    choice: int
    sampling: Sampling
    max_total: int  # it ends when it has this many tokens
    priority: int
    arrival: float
    number: int  # order of admission, breaks all ties
    chain: NameChain
    takes_credit: bool = True  # whether it may reuse cached prefixes
    is_reporter: bool = True  # the first choice of its prompt speaks for its siblings
    family: "Family | None" = None
    client: str = ""  # whose it is: clients take turns
    alone: float = 0.0  # predicted seconds of its prompt by itself
    due: float = 0.0  # smaller goes first; once it is past, nobody due later may start before it
    status: SequenceStatus = SequenceStatus.WAITING
    outcome: Finished | None = None  # decided; sent once no launched plan names the sequence
    num_pending: int = 0  # tokens that launched chunks will draw, but for right guesses
    num_guessed: int = 0  # tokens that a launched chunk guesses: nothing is planned behind it
    num_again: int = 0  # planned tokens that its state has not: it went back behind a wrong guess
    num_planned: int = 0
    num_computed: int = 0
    num_reported: int = -1  # prompt tokens reported as done; -1: not even the start was reported
    num_in_flight: int = 0  # launched plans that name it
    clears_at: int | None = None  # suspect: computed tokens that clear it of a failed step
    lease: Lease | None = None
    inputs: PromptInputs = NO_INPUTS
    adapter: str = ""  # the fingerprint of what changes the model for it
    num_units_planned: int = 0  # of all works, in order; those that credit covers count as done
    num_units_computed: int = 0
    guesser: Guesser | None = None
    forced: tuple[int, ...] = ()  # tokens that its grammar lets follow
    num_shown: int = field(init=False)  # prompt tokens that progress counts: a source's, if any
    is_background: bool = field(init=False)  # runs only in time and memory that others leave

    def __post_init__(self) -> None:
        self.is_background = self.priority >= BACKGROUND
        self.num_shown = sum(w.size for w in self.inputs.works if w.is_source) or self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known(self) -> int:
        """Tokens there will be once all launched plans have ended."""
        return len(self.token_ids) + self.num_pending

    @property
    def remaining(self) -> int:
        """Known tokens not yet planned; 1 while running is a decode chunk."""
        num_known = len(self.token_ids) + self.num_pending
        if self.num_guessed:
            return 0  # nobody knows yet where it goes on
        if self.num_pending and num_known >= self.max_total:
            return 0  # its last token is being drawn, and need not be computed
        return num_known - self.num_planned

    @property
    def is_decoding(self) -> bool:
        is_due = self.remaining == 1 or self.num_guessed > 0
        is_living = self.lease is not None and self.outcome is None
        return is_due and is_living and not self.is_taking_in

    @property
    def is_taking_in(self) -> bool:
        """Whether the prompt is open and has works: its last token is no decode chunk."""
        return self.num_planned < self.num_prompt and bool(self.inputs.works)

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def has_begun(self) -> bool:
        """Whether the sequence ran before, here or in an engine that died."""
        return self.num_reported >= 0 or self.num_generated > 0

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def key(self) -> tuple[float, float, int]:
        """Order in which prompts are computed."""
        return self.due, self.arrival, self.number

    @property
    def rank(self) -> tuple[int, float, int]:
        """Order in which running sequences keep their memory; the last is preempted first."""
        return self.priority, self.arrival, self.number

    @property
    def wants_prompt_rows(self) -> bool:
        return self.is_reporter and self.sampling.num_prompt_logprobs is not None

    @property
    def num_processed(self) -> int:
        """How many of those are computed."""
        source = [work for work in self.inputs.works if work.is_source]
        if not source:
            return min(self.num_computed, self.num_prompt)
        return self.num_shown * self.num_units_computed // sum(w.num_units for w in source)

    def next_work(self, num_cached: int) -> DueWork | None:
        """The first work with units that no plan has yet and that later tokens need."""
        planned = max(self.num_units_planned, self._units_before(num_cached))
        for number, work in enumerate(self.inputs.works):
            if planned < work.num_units:
                return DueWork(number, work, planned)
            planned -= work.num_units
        return None

    def _units_before(self, num_cached: int) -> int:
        return sum(w.num_units for w in self.inputs.works if w.end <= num_cached)

    def span_around(self, position: float) -> tuple[int, int] | None:
        """The unbreakable span that a cut before token `position` would break."""
        for start, end in self.inputs.spans:
            if start < position < end:
                return start, end
        return None

    def join(self, family: "Family", alone: bool) -> None:
        """Become one of the choices of a prompt; with `alone`, do not wait for the leader."""
        self.is_reporter = family.leader is self
        self.family = None if alone else family

    def lead(self, is_reporter: bool) -> None:
        """Take over from a leader that has ended."""
        self.is_reporter = is_reporter

    def set_due(self, alone: float, patience: float) -> None:
        """Set when its prompt, which takes `alone` seconds by itself, should have its turn."""
        self.alone = alone
        self.due = due_time(self.arrival, patience, alone, self.priority)

    def suspect(self, clears_at: int) -> None:
        """Suspect it of a failed step until its first `clears_at` tokens are computed."""
        self.clears_at = max(clears_at, self.clears_at or 0)

    def clear(self) -> None:
        """End the suspicion."""
        self.clears_at = None

    def run(self, lease: Lease) -> None:
        """Start, with this memory."""
        self.status, self.lease = SequenceStatus.RUNNING, lease

    def run_beside(self, leader: "Sequence", lease: Lease) -> None:
        """Start, with memory that shares what the leader has computed of their prompt."""
        self.run(lease)
        self.chain = leader.chain.copy()
        self.num_units_planned = self.num_units_computed = leader.num_units_planned

    def start_at(self, num_cached: int) -> None:
        """Starts behind tokens in memory already; works that only they needed are not encoded."""
        self.num_planned = self.num_computed = num_cached
        self.num_units_planned = self.num_units_computed = self._units_before(num_cached)

    def skip_to(self, end: int) -> None:
        """Tokens up to `end` are loaded in a plan; works that only they needed are not encoded."""
        assert self.num_computed <= self.num_planned < end < self.num_known
        self.num_planned = end
        self.num_units_planned = max(self.num_units_planned, self._units_before(end))
        self.num_units_computed = max(self.num_units_computed, self._units_before(end))
        self.num_in_flight += 1

    def advance(self, end: int, draws: bool) -> None:
        """A chunk that ends at token `end` is in a plan."""
        num_known = len(self.token_ids) + self.num_pending
        assert self.num_computed <= self.num_planned <= end <= num_known
        self.num_planned = end
        self.num_pending += draws
        self.num_in_flight += 1

    def encode(self, num_units: int) -> None:
        """Count further units of its works as planned."""
        self.num_units_planned += num_units
        self.num_in_flight += 1

    def guess(self, make_guesser: Callable[["Sequence"], Guesser], most: int) -> Guess:
        """Guess at most `most` of the tokens that follow."""
        if self.guesser is None:
            self.guesser = make_guesser(self)
        return self.guesser.guess(self.token_ids, self.forced, most)

    def plan_guess(self, num_guessed: int) -> None:
        """Note how many guessed tokens its planned chunk ends with."""
        self.num_guessed = num_guessed

    def take_in_again(self) -> int:
        """Return how many tokens a wrong guess removed from its state, to be computed again."""
        num_again, self.num_again = self.num_again, 0
        return num_again

    def commit_units(self, num_units: int) -> None:
        """Count further units of its works as encoded."""
        self.num_in_flight -= 1
        self.num_units_computed += num_units

    def commit_guess(self, num_right: int, num_again: int) -> None:
        """Count the guesses that were right; `num_again` tokens have to be computed again."""
        self.num_guessed, self.num_again = 0, num_again
        self.num_planned += num_right

    def commit_tokens(self, end: int) -> None:
        """Count the tokens up to `end`, which a plan computed or loaded."""
        self.num_in_flight -= 1
        self.num_computed = end

    def commit_draw(self, forced: tuple[int, ...]) -> None:
        """Count a launched draw as done; its grammar forces `forced` next."""
        self.num_pending -= 1
        self.forced = forced

    def append(self, token_id: int) -> FinishReason | None:
        """Append a token that was drawn; return the reason if the answer ends with it."""
        self.token_ids.append(token_id)
        return self.end_reason()

    def report(self, num_reported: int) -> None:
        """Note how many tokens of its prompt were reported as processed."""
        self.num_reported = num_reported

    def decide(self, finish: FinishReason, message: str = "", vector: bytes = b"") -> None:
        """Set how it ends; it must have no outcome yet."""
        code = "internal_error" if finish is FinishReason.ERROR else ""
        self.outcome = Finished(self.id, finish, code, message, vector)

    def finish(self) -> None:
        """End, without memory."""
        self.status, self.lease = SequenceStatus.FINISHED, None

    def leave_plans(self) -> None:
        """Forget the launched plans that name it, since they were dropped."""
        self.num_in_flight = 0

    def rewind(self) -> None:
        """Back to waiting: keeps every token, counts none as computed."""
        self.status, self.lease = SequenceStatus.WAITING, None
        self.num_pending = self.num_guessed = self.num_again = 0
        self.num_planned = self.num_computed = 0
        self.num_units_planned = self.num_units_computed = 0

    def end_reason(self) -> FinishReason | None:
        """Why the tokens so far are the whole answer; None if they are not."""
        num_tokens = len(self.token_ids)
        num_generated = num_tokens - self.num_prompt
        if num_generated and self.sampling.ends_with(self.token_ids[-1], num_generated):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_total else None


class Family:
    """The choices of one prompt: the leader computes it, the others wait for its final chunk."""

    def __init__(self, leader: Sequence) -> None:
        self.leader = leader
        self.waiting: list[Sequence] = []

    def hand_over(self) -> Sequence | None:
        """Make the next choice the leader, if one waits; return it."""
        if not self.waiting:
            return None
        leader = self.waiting.pop(0)
        leader.lead(is_reporter=self.leader.num_reported < 0)
        self.leader = leader
        return leader
