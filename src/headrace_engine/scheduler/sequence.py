"""Holds the few integers that describe one choice of a request during its generation.

The text and the cached data are stored elsewhere.
"""

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from headrace_common.ids import SequenceId
from headrace_common.messages import Finished, FinishReason
from headrace_common.plan import EncoderInput, PromptInputs, SourceSpec
from headrace_common.request import BACKGROUND
from headrace_common.sampling import Sampling
from headrace_engine.memory.memory import Lease
from headrace_engine.memory.prefix import NameChain
from headrace_engine.scheduler.guess import DraftChance, Guess, Guesser

NO_INPUTS = PromptInputs()
# Seconds by which one level of priority delays a prompt.
PRIORITY_LEVEL_S = 10.0
# Seconds that a client is charged for each start, in addition to the prompt's own seconds.
START_COST_S = 1.0
by_id = attrgetter("id")
by_key = attrgetter("key")
by_rank = attrgetter("rank")


def due_time(arrival: float, patience: float, alone: float, priority: int) -> float:
    """Return the due time of a prompt that takes `alone` seconds if nothing else runs.

    Longer prompts are due later. But a due time never changes, so every prompt is eventually due
    before all new requests. No clock is needed.
    """
    return arrival + patience * alone + PRIORITY_LEVEL_S * priority


def source_inputs(token_ids: "array[int]", spec: SourceSpec) -> PromptInputs:
    """Return the source tokens as an encoder input, for an encoder-decoder model."""
    return PromptInputs((spec.encoding(len(token_ids), token_ids.tobytes()),))


class DueEncoding(NamedTuple):
    """Says which units to encode next: the units of input `number`, starting with unit `start`."""

    number: int
    work: EncoderInput
    start: int


class SequenceStatus(enum.Enum):
    """Says whether a sequence holds memory. All other state is in the sequence's fields."""

    # The sequence holds no memory.
    WAITING = "waiting"
    # The sequence holds a lease of memory.
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Represents one choice of a request, from submission to end.

    Tokens [0, num_computed) are in memory. Tokens [0, num_planned) will be in memory once all
    launched plans are committed. Other classes may read the fields; only the methods of this
    class write the fields.
    """

    id: SequenceId
    # The prompt, then every token sampled so far.
    token_ids: "array[int]"
    num_prompt: int
    choice: int
    sampling: Sampling
    # The sequence ends when it has this many tokens.
    max_total: int
    priority: int
    arrival: float
    # The sequence's number in the order of admission, which breaks ties.
    number: int
    chain: NameChain
    # Whether the sequence may reuse cached prefixes.
    uses_prefix_cache: bool = True
    # Whether this sequence reports the prompt: its progress and its log probabilities. The choices
    # of a prompt usually have one reporter.
    is_reporter: bool = True
    family: "Family | None" = None
    # The tenant or client that sent the request; clients share the engine fairly.
    client: str = ""
    # The predicted seconds to process the prompt if nothing else runs.
    alone: float = 0.0
    # When the prompt is due. Among a client's prompts, the prompt with the earliest due time is
    # next. After the due time, no later sequence in the queue may start before this sequence.
    due: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    # The outcome is set as soon as the end is decided, and sent once no launched plan names the
    # sequence.
    outcome: Finished | None = None
    # How many tokens launched chunks will draw, without correct guesses.
    num_pending: int = 0
    # How many guessed tokens a launched chunk has. Until the chunk is committed, nothing else is
    # planned for the sequence.
    num_guessed: int = 0
    # Whether the draft model chooses these guessed tokens.
    is_drafted: bool = False
    # How many tokens to process again, because a wrong guess reset the recurrent state.
    num_to_recompute: int = 0
    # The draft model's cache will have tokens [0, num_draft_read) after all launched plans.
    num_draft_read: int = 0
    draft_chance: DraftChance | None = None
    num_planned: int = 0
    num_computed: int = 0
    # How many prompt tokens were reported as processed; -1 before the start was reported.
    num_reported: int = -1
    # How many launched plans name the sequence.
    num_in_flight: int = 0
    # For a suspect of a failed step, the number of processed tokens that clears the suspect.
    clears_at: int | None = None
    lease: Lease | None = None
    inputs: PromptInputs = NO_INPUTS
    # The fingerprint of the sequence's LoRA adapter; empty if there is no adapter.
    adapter: str = ""
    # How many encoder units are planned or replaced by a cached prefix, summed over all inputs.
    num_units_planned: int = 0
    num_units_computed: int = 0
    guesser: Guesser | None = None
    # Tokens that must follow according to the sequence's grammar.
    forced: tuple[int, ...] = ()
    # The state of the samplers after the last token.
    state: bytes = b""
    # The number of tokens at which the prompt's progress is complete: the number of source tokens
    # if there is a source, else the number of prompt tokens.
    num_shown: int = field(init=False)
    # Whether the sequence uses only time and memory that no other sequence needs.
    is_background: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_background = self.priority >= BACKGROUND
        self.num_shown = sum(w.size for w in self.inputs.works if w.is_source) or self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known(self) -> int:
        """Return how many tokens the sequence has once all launched plans are committed."""
        return len(self.token_ids) + self.num_pending

    @property
    def remaining(self) -> int:
        """Return how many known tokens are not planned yet; 1 for a sequence that decodes."""
        num_known = len(self.token_ids) + self.num_pending
        if self.num_guessed:
            # The number of correct guesses is not known yet.
            return 0
        if self.num_pending and num_known >= self.max_total:
            # The sequence's last token is being drawn, and need not be processed.
            return 0
        return num_known - self.num_planned

    @property
    def is_decoding(self) -> bool:
        is_due = self.remaining == 1 or self.num_guessed > 0
        is_living = self.lease is not None and self.outcome is None
        return is_due and is_living and not self.has_open_inputs

    @property
    def has_open_inputs(self) -> bool:
        """Return whether the prompt is unfinished and has encoder inputs.

        If so, a chunk of the last prompt token is not a decode chunk.
        """
        return self.num_planned < self.num_prompt and bool(self.inputs.works)

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def has_started(self) -> bool:
        """Return whether the sequence has run before, in this engine or in an engine that died."""
        return self.num_reported >= 0 or self.num_generated > 0

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def key(self) -> tuple[float, float, int]:
        """Return the sort key for the order in which prompts are processed."""
        return self.due, self.arrival, self.number

    @property
    def rank(self) -> tuple[int, float, int]:
        """Return the sort key of running sequences; the last sequence is preempted first."""
        return self.priority, self.arrival, self.number

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.is_reporter and self.sampling.num_prompt_logprobs is not None

    @property
    def num_processed(self) -> int:
        """Return how many of the `num_shown` prompt tokens are processed."""
        source = [work for work in self.inputs.works if work.is_source]
        if not source:
            return min(self.num_computed, self.num_prompt)
        return self.num_shown * self.num_units_computed // sum(w.num_units for w in source)

    def next_encoding(self, num_cached: int) -> DueEncoding | None:
        """Return the units to encode next for the tokens after `num_cached`, or None."""
        planned = max(self.num_units_planned, self._units_before(num_cached))
        for number, work in enumerate(self.inputs.works):
            if planned < work.num_units:
                return DueEncoding(number, work, planned)
            planned -= work.num_units
        return None

    def _units_before(self, num_cached: int) -> int:
        return sum(w.num_units for w in self.inputs.works if w.end <= num_cached)

    def span_around(self, position: float) -> tuple[int, int] | None:
        """Return the unbreakable span that a cut before `position` would split, or None."""
        for start, end in self.inputs.spans:
            if start < position < end:
                return start, end
        return None

    def join(self, family: "Family", alone: bool) -> None:
        """Join the other choices of the prompt. With `alone`, process the prompt separately."""
        # The choices that do not wait may start before the leader, so each of them reports.
        self.is_reporter = alone or family.leader is self
        self.family = None if alone else family

    def lead(self, is_reporter: bool) -> None:
        """Become the leader, because the previous leader has ended."""
        self.is_reporter = is_reporter

    def set_due(self, alone: float, patience: float) -> None:
        """Set the due time of a prompt that takes `alone` seconds if nothing else runs."""
        self.alone = alone
        self.due = due_time(self.arrival, patience, alone, self.priority)

    def suspect(self, clears_at: int) -> None:
        """Make the sequence a suspect until the first `clears_at` tokens are processed."""
        self.clears_at = max(clears_at, self.clears_at or 0)

    def clear(self) -> None:
        """End the suspicion."""
        self.clears_at = None

    def run(self, lease: Lease) -> None:
        """Start with the memory of `lease`."""
        self.status, self.lease = SequenceStatus.RUNNING, lease

    def run_sibling(self, leader: "Sequence", lease: Lease) -> None:
        """Start with a lease that shares the leader's processed prompt."""
        self.run(lease)
        self.chain = leader.chain.copy()
        self.num_draft_read = leader.num_draft_read
        self.num_units_planned = self.num_units_computed = leader.num_units_planned

    def start_at(self, num_cached: int) -> None:
        """Start after `num_cached` tokens that are in memory already.

        Encoder inputs that only the cached tokens need count as encoded.
        """
        self.num_planned = self.num_computed = self.num_draft_read = num_cached
        self.num_units_planned = self.num_units_computed = self._units_before(num_cached)

    def skip_to(self, end: int) -> None:
        """Count the tokens up to `end` as planned, because a plan loads these tokens from disk.

        Encoder inputs that only the loaded tokens need count as encoded.
        """
        assert self.num_computed <= self.num_planned < end < self.num_known
        if self.num_draft_read == self.num_planned:
            # The file also has the draft model's part of the cache.
            self.num_draft_read = end
        self.num_planned = end
        self.num_units_planned = max(self.num_units_planned, self._units_before(end))
        self.num_units_computed = max(self.num_units_computed, self._units_before(end))
        self.num_in_flight += 1

    def advance(self, end: int, draws: bool) -> None:
        """Count the tokens up to `end` as planned, in a chunk that may draw the next token."""
        num_known = len(self.token_ids) + self.num_pending
        assert self.num_computed <= self.num_planned <= end <= num_known
        self.num_planned = end
        self.num_pending += draws
        self.num_in_flight += 1

    def encode(self, num_units: int) -> None:
        """Count `num_units` more encoder units as planned."""
        self.num_units_planned += num_units
        self.num_in_flight += 1

    def guess(self, make_guesser: Callable[["Sequence"], Guesser], most: int) -> Guess:
        """Return a guess of at most `most` next tokens."""
        if self.guesser is None:
            self.guesser = make_guesser(self)
        return self.guesser.guess(self.token_ids, self.forced, most)

    def guess_drafts(self, usual: DraftChance, most: int) -> Guess:
        """Return a guess of at most `most` next tokens that the draft model would choose."""
        if self.draft_chance is None:
            self.draft_chance = DraftChance(usual)
        return self.draft_chance.guess(most)

    def read_draft(self, end: int) -> None:
        """Count the tokens up to `end` as processed by the draft model."""
        self.num_draft_read = end

    def plan_guess(self, num_guessed: int, is_drafted: bool = False) -> None:
        """Set how many guessed tokens the planned chunk ends with, and who chooses them."""
        self.num_guessed, self.is_drafted = num_guessed, is_drafted

    def take_num_to_recompute(self) -> int:
        """Return how many tokens to process again after a wrong guess, and reset that number."""
        num_to_recompute, self.num_to_recompute = self.num_to_recompute, 0
        return num_to_recompute

    def commit_units(self, num_units: int) -> None:
        """Count `num_units` more encoder units as encoded."""
        self.num_in_flight -= 1
        self.num_units_computed += num_units

    def commit_guess(self, num_right: int, num_to_recompute: int) -> None:
        """Count the correct guesses; `num_to_recompute` tokens have to be processed again."""
        if self.is_drafted and self.draft_chance is not None:
            # The draft model has not processed the last token that it chose.
            self.num_draft_read += min(num_right, self.num_guessed - 1)
            self.draft_chance.learn(self.num_guessed, num_right)
        self.num_guessed, self.num_to_recompute = 0, num_to_recompute
        self.num_planned += num_right

    def commit_tokens(self, end: int) -> None:
        """Count the tokens up to `end` as processed."""
        self.num_in_flight -= 1
        self.num_computed = end

    def commit_draw(self, forced: tuple[int, ...], state: bytes) -> None:
        """Count a launched draw as done, and store the forced tokens and the samplers' state."""
        self.num_pending -= 1
        self.forced, self.state = forced, state

    def append(self, token_id: int) -> FinishReason | None:
        """Append a drawn token; return the reason if the answer ends with this token."""
        self.token_ids.append(token_id)
        return self.end_reason()

    def report(self, num_reported: int) -> None:
        """Set how many tokens of the prompt were reported as processed."""
        self.num_reported = num_reported

    def decide(self, finish: FinishReason, message: str = "", vector: bytes = b"") -> None:
        """Set the outcome, which must not be set yet."""
        code = "internal_error" if finish is FinishReason.ERROR else ""
        self.outcome = Finished(self.id, finish, code, message, vector)

    def finish(self) -> None:
        """End the sequence, and give up the lease."""
        self.status, self.lease = SequenceStatus.FINISHED, None

    def leave_plans(self) -> None:
        """Forget all launched plans that name the sequence, because the plans were dropped."""
        self.num_in_flight = 0

    def rewind(self) -> None:
        """Let the sequence wait again: keep every token, but count no token as processed."""
        # A failed step may have lost the leader's report, and the leader may start later.
        self.is_reporter |= self.num_reported < 0
        self.status, self.lease = SequenceStatus.WAITING, None
        self.num_pending = self.num_guessed = self.num_to_recompute = 0
        self.num_planned = self.num_computed = self.num_draft_read = 0
        self.num_units_planned = self.num_units_computed = 0

    def end_reason(self) -> FinishReason | None:
        """Return why the answer is complete; None if the answer is not complete."""
        num_tokens = len(self.token_ids)
        num_generated = num_tokens - self.num_prompt
        if num_generated and self.sampling.ends_with(self.token_ids[-1], num_generated):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_total else None


class Family:
    """Groups the choices of one prompt. The leader processes the prompt for all choices."""

    def __init__(self, leader: Sequence) -> None:
        self.leader = leader
        self.waiting: list[Sequence] = []

    def hand_over(self) -> Sequence | None:
        """Make the next waiting choice the leader and return it; None if no choice waits."""
        if not self.waiting:
            return None
        leader = self.waiting.pop(0)
        leader.lead(is_reporter=self.leader.num_reported < 0)
        self.leader = leader
        return leader
