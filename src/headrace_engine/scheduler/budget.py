"""How many prompt tokens fit a step beside its decode chunks; picks no sequence."""

from collections import Counter, deque
from dataclasses import replace
from math import ceil
from statistics import median
from typing import NamedTuple

import msgspec

from headrace_common.config.settings import SchedulerConfig
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Elsewhere, EncodeWork, SourceSpec
from headrace_engine.scheduler.cost import Coefficients, CostModel, StepShape
from headrace_engine.scheduler.row_times import RowTimes

MAX_STEP_TOKENS = {"cpu": 512, "cuda": 2048}
MAX_STALL_MS = {"cpu": 200.0, "cuda": 50.0}
MAX_GUESS = 8
# Nobody asked for the default target, so it gives way where it would starve prompts: a cold one
# should wait at most twice as long for its first token as without a target, and no less than that
# lets: prompts get 1.4 of 2.4 parts of a step, and a token costs more in a small chunk.
DEFAULT_SHARE, ASKED_SHARE = 1.4, 0.25

COLD_TOKENS = 64  # prompt tokens of the first step, while nothing is measured
NUM_OVERHEADS = 64
QUARANTINE, WHOLE, SPAN = "quarantine", "whole", "span"
SAT_OUT = (QUARANTINE, WHOLE)  # steps that streams have no part in
UNMEASURED_TOKENS_PER_S = 500.0
TAIL = 8  # the end of a prompt joins the chunk before it if it is at most 1/TAIL as long


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers a scheduler works under once device and model are known; none are measured."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int  # the model's positions, or fewer if the user said so
    max_stall_s: float | None = None  # for a step while a stream decodes; None: no target
    max_step_s: float | None = None  # for any other step
    prompt_share: float = 0.25  # prompts always get this fraction of the decode chunks' time
    forward_per_chunk: bool = False  # the lane runs its chunks one after another
    is_whole: bool = False  # the lane cannot go on from a cache: prompts are never cut
    source: SourceSpec | None = None  # if prompts are sources to encode
    max_guess: int = 0  # tokens that one chunk may guess

    def max_total(self, layout: MemoryLayout) -> int:
        """Length of the longest sequence, prompt and answer: what an empty memory can hold."""
        bounds = [self.max_model_len]
        if layout.num_blocks:
            bounds.append(layout.num_blocks * layout.block_size)
        if layout.max_positions:
            bounds.append(layout.max_positions)
        return min(bounds)


def resolve(
    config: SchedulerConfig,
    layout: MemoryLayout,
    device: str,
    max_num_seqs: int,
    max_model_len: int,
) -> Limits:
    """Fill in what the configuration leaves open; `device` is cpu or cuda."""
    stall_ms = config.max_stall_ms or MAX_STALL_MS[device]
    default_share = ASKED_SHARE if config.max_stall_ms else DEFAULT_SHARE
    return Limits(
        max_num_seqs=max_num_seqs,
        max_step_tokens=config.max_step_tokens or MAX_STEP_TOKENS[device],
        max_model_len=max_model_len,
        max_stall_s=None if stall_ms == "off" else stall_ms / 1000,
        max_step_s=None if config.max_step_ms == "off" else config.max_step_ms / 1000,
        prompt_share=config.prompt_share or default_share,
        forward_per_chunk=layout.forward_per_chunk,
    )


class StepTimes(NamedTuple):
    """Times of a step, in seconds."""

    computing: float  # in the runner, but for encoding
    encoding: float
    elapsed: float  # in all
    loading: float = 0.0


class Room:
    """The room that one step has for prompts, in tokens and seconds; `seconds` None: no target."""

    def __init__(
        self,
        budget: "TimeBudget",
        coefficients: Coefficients,
        tokens: int,
        seconds: float | None,
    ) -> None:
        self._budget = budget
        self._coefficients = coefficients
        self._forwards = budget.forwards
        self.tokens = tokens
        self.seconds = seconds
        self.target: float | None = None  # of the whole step
        self.is_awaited = False  # whether a stream waits for this step
        self.cause = ""  # why the step may be predicted to miss its target

    @property
    def is_open(self) -> bool:
        return self.tokens > 0 and (self.seconds is None or self.seconds > 0)

    def largest_chunk(self, context: int, wanted: int, is_first: bool) -> int:
        """How many of `wanted` tokens fit behind `context` computed ones; 0 if none do.

        The first prompt of a step always advances in the long run, however long its context.
        """
        length = self._fitting_chunk(context, wanted)
        if self._budget.is_whole:
            return wanted if is_first or length == wanted else 0
        if not is_first:
            return length
        if self.is_awaited and (not length or self._should_save(context, length, wanted)):
            return self._chunk_from_savings(context, wanted)
        self._budget.kept = 0.0
        return max(length, 1)

    def fits(self, context: int, length: int) -> bool:
        """Whether a chunk is within tokens and seconds."""
        return self._fitting_chunk(context, length) >= length

    def largest_piece(self, size: int, wanted: int, is_first: bool) -> int:
        """How many of `wanted` units of an encoder fit; 0 if none do.

        One that is larger than any room is saved for, as a token is.
        """
        seconds = self.target if self.seconds is None else self.seconds
        if seconds is None:
            return wanted
        units = self._budget.units_within(seconds, size)
        if units or not is_first:
            return min(units, wanted)
        self._budget.kept += seconds
        if self.is_awaited and self._budget.kept < self._budget.seconds_of_units(size, 1):
            return 0
        self._budget.kept = 0.0
        self.cause = "token"
        return 1

    def spend_seconds(self, seconds: float) -> None:
        """Spends them on what is no chunk: loads, and an encoder's units."""
        if self.seconds is not None:
            self.seconds -= seconds

    def _fitting_chunk(self, context: int, wanted: int) -> int:
        hard = min(wanted, self.tokens)
        if self.seconds is None:
            return hard
        hard = min(hard, self._budget.model.largest_foreseen(context))
        fitting = self._coefficients.largest_chunk(context, self.seconds, self._forwards)
        if fitting is None or fitting >= hard:
            return hard
        if wanted - fitting <= fitting // TAIL and wanted <= self.tokens:
            self.cause = self.cause or "tail"
            return wanted
        return fitting

    def _should_save(self, context: int, length: int, wanted: int) -> bool:
        """Whether one larger chunk in several steps beats `length` tokens in each.

        Only if no step can meet its target anyway. Reading a long context may then take nearly
        all of the room, however few tokens follow it.
        """
        if self.cause != "decode" or not self.seconds:
            return False
        price, several = self._chunk_to_save_for(context, wanted)
        return several > length * ceil(price / self.seconds)

    def _chunk_from_savings(self, context: int, wanted: int) -> int:
        """Save the room of each step until it pays for a larger chunk."""
        assert self.seconds is not None
        price, several = self._chunk_to_save_for(context, wanted)
        self._budget.kept += self.seconds
        if self._budget.kept < price:
            return 0
        self._budget.kept = 0.0
        self.cause = "token"
        return several

    def _chunk_to_save_for(self, context: int, wanted: int) -> tuple[float, int]:
        """The price of two tokens in steps of their own, and how many it buys in one step."""
        price = 2 * self._coefficients.cost(context, 1, self._forwards)
        several = self._coefficients.largest_chunk(context, price, self._forwards) or 1
        foreseen = self._budget.model.largest_foreseen(context)
        return price, min(wanted, self.tokens, several, foreseen)

    def spend(self, context: int, length: int) -> None:
        self.tokens -= length
        if self.seconds is not None:
            self.seconds -= self._coefficients.cost(context, length, self._forwards)


class TimeBudget:
    """The stall target, and what is learned and kept from step to step to hold it."""

    def __init__(self, limits: Limits) -> None:
        self.model = CostModel()
        self.encoding = CostModel()
        self.rows = RowTimes() if limits.max_guess else None  # only guesses use them
        self.missed: Counter[str] = Counter()  # steps that missed the stall target, by cause
        self.kept = 0.0  # seconds saved for a chunk that fits no single step
        self.starved_s = 0.0  # how long prompts have had no more than a small share
        self.forwards = int(limits.forward_per_chunk)  # that each further chunk adds to a step
        self.is_whole = limits.is_whole
        self.elsewhere = Elsewhere()
        self.decode_s = 0.0  # of the step opened last, for streams alone
        self._is_excused = False  # whether a late next step is counted already
        self._limits = limits
        self._max_tokens = limits.max_step_tokens
        self._cold_tokens = COLD_TOKENS
        self._cold_units = 1
        self._overheads: deque[float] = deque(maxlen=NUM_OVERHEADS)
        self._prompt_steps: deque[tuple[int, float]] = deque(maxlen=NUM_OVERHEADS)

    @property
    def overhead(self) -> float:
        """Usual time of a step outside the runner."""
        return median(self._overheads) if self._overheads else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Rate of recent steps that had prompt tokens; 0 if there were none."""
        seconds = sum(seconds for _, seconds in self._prompt_steps)
        return sum(tokens for tokens, _ in self._prompt_steps) / seconds if seconds else 0.0

    def leave_room(self, elsewhere: Elsewhere) -> None:
        """Leave room in the steps to come for engines beside this one."""
        self.elsewhere = elsewhere

    def halve_tokens(self, at_least: int) -> bool:
        """Make steps smaller until the engine restarts; False if they would get too small."""
        if self._max_tokens // 2 < at_least:
            return False
        self._max_tokens //= 2
        return True

    def seconds_alone(self, context: int, new: int) -> float:
        """How long a prompt takes by itself, in the largest steps that the cap allows."""
        if not self.model.is_measured:
            return new / UNMEASURED_TOKENS_PER_S
        num_steps = -(-new // self._max_tokens)
        coefficients = self.model.coefficients
        reading_again = coefficients.g * (num_steps - 1) * (context + new / 2)
        return coefficients.c_prompt * num_steps + (coefficients.cost(context, new) + reading_again)

    def seconds_encoding(self, work: EncodeWork) -> float:
        """How long it takes by itself; a rough guess while nothing is measured."""
        if not self.encoding.is_measured:
            return work.size / UNMEASURED_TOKENS_PER_S
        return self.seconds_of_units(work.size, work.num_units)

    def seconds_of_units(self, size: int, num_units: int) -> float:
        """Seconds that an encoder's units add to a step, with the margin of their model."""
        shape = StepShape()
        shape.encode(size, num_units)
        return self.encoding.margin(True) * self.encoding.predict(shape.encoding)

    def units_within(self, room: float, size: int) -> int:
        """How many units of an encoder fit that many seconds."""
        if not self.encoding.is_measured:
            return self._cold_units
        first, second = self.seconds_of_units(size, 1), self.seconds_of_units(size, 2)
        if room < first:
            return 0
        each = second - first
        return 1 + int((room - first) / each + 1e-9) if each > 0 else 1 << 30

    def predict(self, shape: StepShape) -> float:
        """Seconds of a step in the runner; 0 while unmeasured."""
        computing = self.model.predict(shape) if self.model.is_measured else 0.0
        if not shape.num_encoded:
            return computing
        if not self.encoding.is_measured or (shape.num_new and not computing):
            return 0.0
        return computing + self.encoding.predict(shape.encoding)

    def open(
        self, decoding: StepShape, is_awaited: bool, part: float = 1.0, can_save: bool = True
    ) -> Room:
        """The room beside these decode chunks; `is_awaited`: a stream waits for the step.

        `part` is the share of the target that the step may take. With `can_save`, the step may
        leave its room unused, to save it for a larger chunk.
        """
        tokens = max(1, self._max_tokens - decoding.num_new)
        elsewhere = self.elsewhere
        target = self._target(is_awaited or elsewhere.is_awaited)
        target = None if target is None else part * target
        is_measured, coefficients = self.model.is_measured, self.model.coefficients
        self.decode_s = self._decode_seconds(coefficients, decoding) if is_measured else 0.0
        if target is None:
            return Room(self, coefficients, tokens, None)
        if not is_measured:
            room = Room(self, coefficients, min(tokens, self._cold_tokens), None)
            room.target, room.is_awaited = target, is_awaited and can_save
            return room
        alone = self.decode_s
        left = target / self.model.margin(True) - self.overhead - alone
        # the steps of all engines follow one another, so what one stream waits for is their sum
        left = (left - elsewhere.decode_s) / (1 + elsewhere.num_with_prompts)
        share = part * self._limits.prompt_share * (alone + elsewhere.decode_s)
        tokens = min(tokens, 2 * self.model.largest_measured)
        room = Room(self, coefficients, tokens, max(left, share))
        room.is_awaited = is_awaited and can_save
        if is_awaited and left < share:
            room.cause = "decode"
        return room

    def _target(self, is_awaited: bool) -> float | None:
        return self._limits.max_stall_s if is_awaited else self._limits.max_step_s

    def _decode_seconds(self, coefficients: Coefficients, decoding: StepShape) -> float:
        """Time of the decode chunks alone, in the forward that prompts share with them."""
        shape = replace(decoding)
        if not self._limits.forward_per_chunk:
            shape.num_forwards = 1
        return coefficients.seconds(shape, with_prompt=True)

    def excuse(self, cause: str) -> None:
        """Count a stall before the next step; the model is not blamed if that step is late."""
        self.missed[cause] += 1
        self._is_excused = True

    def expect_miss(self, shape: StepShape, cause: str, predicted: float) -> str:
        """Count a step that a stream waits for if it should miss the target; returns why.

        `predicted` is the result of `predict` for this step. A step that streams sit out
        always counts.
        """
        if cause not in SAT_OUT:
            computing = self.model.predict(shape) if shape.num_encoded else predicted
            if self.is_in_time(shape, computing):
                return ""
        cause = cause or "decode"
        self.missed[cause] += 1
        return cause

    def is_in_time(self, shape: StepShape, computing: float) -> bool:
        """Whether a step should meet the stall target; `computing`: its chunks' seconds."""
        target = self._limits.max_stall_s
        if target is None or not self.model.is_measured:
            return True
        margin = self.model.margin(shape.num_prompt_tokens > 0)
        seconds = margin * computing + self.overhead
        if shape.num_encoded and self.encoding.is_measured:
            seconds += self.encoding.margin(True) * self.encoding.predict(shape.encoding)
        return seconds <= target * (1 + 1e-9)

    def took(self, shape: StepShape, times: StepTimes, is_awaited: bool, cause: str) -> None:
        """Learn from a step. `cause`: why it was expected to miss the target."""
        computing, encoding, elapsed, loading = times
        self._overheads.append(max(0.0, elapsed - computing - encoding - loading))
        target = self._target(is_awaited)
        is_late = is_awaited and target is not None and elapsed > target
        if is_late and not cause and not self._is_excused:
            self.missed["model"] += 1
        self._is_excused = False
        if shape.num_prompt_tokens:
            self._prompt_steps.append((shape.num_prompt_tokens, elapsed))
            is_starved = cause in ("decode", "token") and self._limits.prompt_share < 1
            self.starved_s = self.starved_s + elapsed if is_starved else 0.0
        if shape.num_encoded and encoding:
            self.learn_encoding(shape, encoding, is_awaited)
        if shape.num_new:
            self.learn(shape, computing, is_awaited)

    def learn(self, shape: StepShape, seconds: float, is_awaited: bool = False) -> None:
        """Learn from the time of a step in the runner.

        Until enough is measured, steps double while they are short and halve when they are long,
        so a slow machine is measured after a few steps, too.
        """
        if shape.num_prompt_tokens and (target := self._target(is_awaited)) is not None:
            if seconds < target / 2:
                self._cold_tokens = max(self._cold_tokens, 2 * shape.num_prompt_tokens)
            elif seconds > target:
                half = max(1, shape.num_prompt_tokens // 2)
                self._cold_tokens = min(self._cold_tokens, half)
        self.model.observe(shape, seconds)

    def learn_encoding(self, shape: StepShape, seconds: float, is_awaited: bool = False) -> None:
        """Learn from the time that encoding took; until enough is measured, pieces double."""
        target = self._target(is_awaited)
        if target is None or seconds < target / 2:
            self._cold_units = min(2 * self._cold_units, 1 << 20)
        elif seconds > target:
            self._cold_units = max(1, self._cold_units // 2)
        self.encoding.observe(shape.encoding, seconds)
