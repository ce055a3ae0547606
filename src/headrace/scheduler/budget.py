"""How many prompt tokens a step may hold beside its decode chunks; picks no sequence."""

from collections import Counter, deque
from dataclasses import replace
from math import ceil
from statistics import median

from headrace.scheduler.cost import CostModel, StepShape
from headrace.scheduler.limits import Limits

COLD_TOKENS = 64  # prompt tokens of a step before anything was measured
NUM_OVERHEADS = 64
QUARANTINE = "quarantine"
UNMEASURED_TOKENS_PER_S = 500.0
TAIL = 8  # a rest of at most a 1/TAIL joins the chunk before it


class Room:
    """What is left of one step for prompt work, in tokens and in seconds."""

    def __init__(self, budget: "TimeBudget", tokens: int, seconds: float | None) -> None:
        """`seconds` None: no target."""
        self._budget = budget
        self._coefficients = budget.model.coefficients
        self._forwards = budget.forwards
        self.tokens = tokens
        self.seconds = seconds
        self.is_awaited = False  # whether a stream waits for this step
        self.cause = ""  # why the step may be predicted to miss its target

    @property
    def is_open(self) -> bool:
        return self.tokens > 0 and (self.seconds is None or self.seconds > 0)

    def largest_chunk(self, context: int, wanted: int, is_first: bool) -> int:
        """How much of `wanted` fits, behind `context` computed tokens; 0 if nothing does.

        The first prompt of a step gets on in the long run, however long its context is.
        """
        length = self._fitting_chunk(context, wanted)
        if not is_first:
            return length
        if self.is_awaited and (not length or self._is_better_kept(context, length, wanted)):
            return self._from_kept(context, wanted)
        self._budget.kept = 0.0
        return max(length, 1)

    def _is_better_kept(self, context: int, length: int, wanted: int) -> bool:
        """Whether a prompt gets on faster where the target is out of reach with each step's room.

        Nearly all of that may go into reading the context, however few tokens follow it.
        """
        if self.cause != "decode" or not self.seconds:
            return False
        price = self._price_of_two(context)
        several = self._coefficients.largest_chunk(context, price, self._forwards) or 1
        return min(wanted, self.tokens, several) > length * ceil(price / self.seconds)

    def _price_of_two(self, context: int) -> float:
        return 2 * self._coefficients.cost(context, 1, self._forwards)

    def _fitting_chunk(self, context: int, wanted: int) -> int:
        hard = min(wanted, self.tokens)
        if self.seconds is None:
            return hard
        fitting = self._coefficients.largest_chunk(context, self.seconds, self._forwards)
        if fitting is None or fitting >= hard:
            return hard
        if wanted - fitting <= fitting // TAIL and wanted <= self.tokens:
            self.cause = self.cause or "tail"
            return wanted
        return fitting

    def _from_kept(self, context: int, wanted: int) -> int:
        """Too little fits: keep the room of steps until a chunk worth two tokens is paid for."""
        assert self.seconds is not None
        price = self._price_of_two(context)
        self._budget.kept += self.seconds
        if self._budget.kept < price:
            return 0
        self._budget.kept = 0.0
        self.cause = "token"
        fitting = self._coefficients.largest_chunk(context, price, self._forwards) or 1
        return min(wanted, self.tokens, fitting)

    def spend(self, context: int, length: int) -> None:
        self.tokens -= length
        if self.seconds is not None:
            self.seconds -= self._coefficients.cost(context, length, self._forwards)


class TimeBudget:
    """The stall target, and what is learned and kept from step to step to hold it."""

    def __init__(self, limits: Limits) -> None:
        self.model = CostModel()
        self.missed: Counter[str] = Counter()  # steps that missed the stall target, by cause
        self.kept = 0.0  # seconds saved up for a token that fits no single step
        self.forwards = int(limits.forward_per_chunk)  # what a further chunk adds of them
        self._is_excused = False  # the next long step was counted by its cause
        self._limits = limits
        self._max_tokens = limits.max_step_tokens
        self._cold_tokens = COLD_TOKENS
        self._overheads: deque[float] = deque(maxlen=NUM_OVERHEADS)
        self._prompt_steps: deque[tuple[int, float]] = deque(maxlen=NUM_OVERHEADS)

    @property
    def overhead(self) -> float:
        """Usual time of a step outside the runner."""
        return median(self._overheads) if self._overheads else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Rate of late steps that had prompt tokens; 0 if there were none."""
        seconds = sum(seconds for _, seconds in self._prompt_steps)
        return sum(tokens for tokens, _ in self._prompt_steps) / seconds if seconds else 0.0

    def halve_tokens(self, at_least: int) -> bool:
        """The runner ran out of memory: smaller steps until the engine starts anew."""
        if self._max_tokens // 2 < at_least:
            return False
        self._max_tokens //= 2
        return True

    def seconds_alone(self, context: int, new: int) -> float:
        """How long a prompt takes by itself, in the largest steps that the cap allows."""
        if not self.model.is_measured:
            return new / UNMEASURED_TOKENS_PER_S
        num_steps = -(-new // self._max_tokens)
        return self.model.coefficients.c_prompt * num_steps + (
            self.model.coefficients.cost(context, new)
            + self.model.coefficients.g * (num_steps - 1) * (context + new / 2)
        )

    def open(self, decoding: StepShape, is_awaited: bool) -> Room:
        """The room beside these decode chunks; `is_awaited`: some stream waits for this step."""
        tokens = max(1, self._max_tokens - decoding.num_new)
        target = self._target(is_awaited)
        if target is None:
            return Room(self, tokens, None)
        if not self.model.is_measured:
            return Room(self, min(tokens, self._cold_tokens), None)
        alone = self._decode_seconds(decoding)
        left = target / self.model.margin(True) - self.overhead - alone
        share = self._limits.prompt_share * alone
        room = Room(self, min(tokens, 2 * self.model.largest_measured), max(left, share))
        room.is_awaited = is_awaited
        if is_awaited and left < share:
            room.cause = "decode"
        return room

    def _target(self, is_awaited: bool) -> float | None:
        return self._limits.max_stall_s if is_awaited else self._limits.max_step_s

    def _decode_seconds(self, decoding: StepShape) -> float:
        """The step's decode chunks by themselves, in the forward that the prompts share."""
        shape = replace(decoding)
        if not self._limits.forward_per_chunk:
            shape.num_forwards = 1
        return self.model.coefficients.seconds(shape, with_prompt=True)

    def excuse(self, cause: str) -> None:
        """Count a stall that comes before the next step and is not the model's."""
        self.missed[cause] += 1
        self._is_excused = True

    def expect_miss(self, shape: StepShape, cause: str) -> str:
        """Count a step that some stream waits for, if it is predicted to miss the target.

        One in which a suspect runs alone was counted, whatever it takes: the others sit it out.
        """
        if cause == QUARANTINE:
            return cause
        target = self._limits.max_stall_s
        if target is None or not self.model.is_measured:
            return ""
        margin = self.model.margin(shape.num_prompt_tokens > 0)
        if margin * self.model.predict(shape) + self.overhead <= target * (1 + 1e-9):
            return ""
        cause = cause or "decode"
        self.missed[cause] += 1
        return cause

    def took(
        self, shape: StepShape, seconds: float, elapsed: float, is_awaited: bool, cause: str
    ) -> None:
        """Learn from a step: `seconds` in the runner, `elapsed` in all; `cause`: expected miss."""
        self._overheads.append(max(0.0, elapsed - seconds))
        target = self._target(is_awaited)
        is_late = is_awaited and target is not None and elapsed > target
        if is_late and not cause and not self._is_excused:
            self.missed["model"] += 1
        self._is_excused = False
        if shape.num_prompt_tokens:
            self._prompt_steps.append((shape.num_prompt_tokens, elapsed))
        self.learn(shape, seconds, is_awaited)

    def learn(self, shape: StepShape, seconds: float, is_awaited: bool = False) -> None:
        """From the time of a step.

        Before enough is known, steps double while they are short and halve when they are long, so
        that a slow machine is known after a few as well.
        """
        target = self._target(is_awaited)
        if shape.num_prompt_tokens and target is not None:
            if seconds < target / 2:
                self._cold_tokens = max(self._cold_tokens, 2 * shape.num_prompt_tokens)
            elif seconds > target:
                half = max(1, shape.num_prompt_tokens // 2)
                self._cold_tokens = min(self._cold_tokens, half)
        self.model.observe(shape, seconds)
