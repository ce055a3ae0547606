"""Computes how many prompt tokens a step can take in addition to its decode chunks.

The planner chooses the sequences.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from statistics import median
from typing import NamedTuple

import msgspec

from headrace_common.config.settings import SchedulerConfig
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Elsewhere, EncoderInput, EncoderPiece, SourceSpec
from headrace_engine.scheduler.cost import Coefficients, CostModel, StepShape
from headrace_engine.scheduler.row_times import RowTimes

MAX_STEP_TOKENS = {"cpu": 512, "cuda": 2048}
MAX_STALL_MS = {"cpu": 200.0, "cuda": 50.0}
MAX_GUESS = 8
# Prompts always get at least this fraction of the time of the decode chunks. The first value
# applies to the default stall target: prompts get at least 1.4 seconds for each second of decode
# chunks. A step may exceed the default target, because the user did not choose that target. The
# second value applies to a target that the user has set.
DEFAULT_SHARE, EXPLICIT_SHARE = 1.4, 0.25

# The default stall target rises until a step processes prompts at this fraction of the best
# possible rate, but to at most MOST_DEFAULT_S seconds.
DEFAULT_RATE, MOST_DEFAULT_S = 0.8, 0.5

# The maximum number of prompt tokens in a step before any step was timed.
COLD_TOKENS = 64
NUM_OVERHEADS = 64
QUARANTINE, WHOLE, SPAN = "quarantine", "whole", "span"
# Causes of a missed stall target. In a step with one of these causes, streams get no token.
WITHOUT_STREAMS = (QUARANTINE, WHOLE)
UNMEASURED_TOKENS_PER_S = 500.0
# A chunk is extended to the end of its prompt if that adds at most 1/TAIL of its length.
TAIL = 8


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the scheduler's limits, which follow from settings, device and model."""

    max_num_seqs: int
    max_step_tokens: int
    # The maximum number of tokens in a sequence: the model's number of positions, or a smaller
    # limit that the user has set.
    max_model_len: int
    # The stall target: how many seconds a step may take if a stream waits for the step. None
    # means no target.
    max_stall_s: float | None = None
    # Whether the stall target is the default, which may rise.
    is_default: bool = False
    # How many seconds a step may take if no stream waits for the step. None means no limit.
    max_step_s: float | None = None
    # Prompts always get at least this fraction of the time of the decode chunks.
    prompt_share: float = 0.25
    # Whether the lane (the way of running this kind of model) processes each chunk of a step in a
    # separate forward pass.
    forward_per_chunk: bool = False
    # Whether prompts are never split, because the lane cannot continue from a cache.
    is_whole: bool = False
    # How to encode prompts, if the model has an encoder and a decoder.
    source: SourceSpec | None = None
    # The largest number of guessed tokens in a chunk.
    max_guess: int = 0
    # How many positions the draft model can process; 0 without a draft model.
    max_draft: int = 0

    def max_total(self, layout: MemoryLayout) -> int:
        """Return the maximum number of tokens in a sequence: the prompt and the answer together."""
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
    """Return the limits. Unset settings get the defaults of `device`, which is cpu or cuda."""
    stall_ms = config.max_stall_ms or MAX_STALL_MS[device]
    default_share = EXPLICIT_SHARE if config.max_stall_ms else DEFAULT_SHARE
    return Limits(
        max_num_seqs=max_num_seqs,
        max_step_tokens=config.max_step_tokens or MAX_STEP_TOKENS[device],
        max_model_len=max_model_len,
        max_stall_s=None if stall_ms == "off" else stall_ms / 1000,
        is_default=config.max_stall_ms is None,
        max_step_s=None if config.max_step_ms == "off" else config.max_step_ms / 1000,
        prompt_share=config.prompt_share or default_share,
        forward_per_chunk=layout.forward_per_chunk,
    )


class StepTimes(NamedTuple):
    """Holds the measured times of one step, in seconds."""

    # Seconds in the runner, without encoding, loading and drafting.
    computing: float
    # Seconds of each piece in `StepShape.encoded`.
    encoding: tuple[float, ...]
    # Seconds of the whole step, including the engine's own overhead.
    elapsed: float
    loading: float = 0.0
    # Seconds in the draft model, in a step with only decode chunks.
    drafting: float = 0.0


class Room:
    """Holds the tokens and seconds that one step has left for prompts.

    `seconds` is None if the step has no target. A chunk takes time to read its context (the
    tokens already processed), even if few tokens are new. After a very long context, even one
    token can take longer than a step has left. In this case, several steps leave their seconds
    unused. The unused seconds add up in `TimeBudget.saved_s` until the sum covers one larger
    chunk.
    """

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
        # Seconds for the whole step. Set only while the cost model has too few measurements.
        self.target: float | None = None
        # Whether a stream waits for this step.
        self.is_awaited = False
        # Whether the step may leave its seconds unused, to save them for a larger chunk.
        self.can_save = True
        # Why the step is expected to miss the stall target; empty if no miss is expected.
        self.cause = ""

    @property
    def is_open(self) -> bool:
        return self.tokens > 0 and (self.seconds is None or self.seconds > 0)

    def largest_chunk(self, context: int, wanted: int, is_first: bool) -> int:
        """Return how many of `wanted` tokens fit after `context` processed tokens; 0 if none fits.

        The first prompt of a step gets at least one token, or the step saves its room for a later
        chunk. So every prompt advances sooner or later, even after a very long context.
        """
        length = self._fitting_chunk(context, wanted)
        if self._budget.is_whole:
            return wanted if is_first or length == wanted else 0
        if not is_first:
            return length
        if self.is_awaited and (not length or self._should_save(context, length, wanted)):
            if self.can_save:
                return self._chunk_from_savings(context, wanted)
            if not length:
                self.cause = "token"
        self._budget.saved_s = 0.0
        return max(length, 1)

    def fits(self, context: int, length: int) -> bool:
        """Return whether a chunk of this length fits into the remaining tokens and seconds."""
        return self._fitting_chunk(context, length) >= length

    def largest_pieces(
        self, work: EncoderInput, start: int, is_first: bool
    ) -> Iterator[EncoderPiece]:
        """Yield pieces of an encoding that fit, from unit `start`; none if no unit fits.

        If one unit takes longer than the room of a step, several steps save their room for the
        unit.
        """
        left = self.target if self.seconds is None else self.seconds
        for piece in work.pieces(start, work.num_units):
            wanted = piece.end - piece.start
            num_units = wanted
            if left is not None:
                num_units = self._budget.units_within(left, work, piece)
                if not num_units and is_first and piece.start == start:
                    num_units = self._unit_from_savings(left, work, piece)
                if not num_units:
                    return
                piece = piece._replace(end=piece.start + min(num_units, wanted))
                seconds = self._budget.seconds_of_piece(work, piece)
                left -= seconds
                self.spend_seconds(seconds)
            yield piece
            if num_units < wanted:
                return

    def _unit_from_savings(self, seconds: float, work: EncoderInput, piece: EncoderPiece) -> int:
        """Add `seconds` to `saved_s`; return 1 if that covers one encoder unit, otherwise 0."""
        unit = piece._replace(end=piece.start + 1)
        self._budget.saved_s += seconds
        needed = self._budget.seconds_of_piece(work, unit)
        if self.is_awaited and self.can_save and self._budget.saved_s < needed:
            return 0
        self._budget.saved_s = 0.0
        self.cause = "token"
        return 1

    def set_cause(self, cause: str) -> None:
        """Set why the step is expected to miss the stall target; empty if no miss is expected."""
        self.cause = cause

    def spend_seconds(self, seconds: float) -> None:
        """Subtract the seconds that loaded blocks or encoder units take."""
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
        """Return whether one larger chunk after several steps is faster than `length` in each step.

        A prompt that waits saves the time of these steps. This is considered only if the decode
        chunks alone already miss the target. In this case, reading a long context can take nearly
        all of the time that a step has for prompts, even if few new tokens follow.
        """
        if self.cause != "decode" or not self.seconds:
            return False
        price, several = self._chunk_to_save_for(context, wanted)
        return several > length * ceil(price / self.seconds)

    def _chunk_from_savings(self, context: int, wanted: int) -> int:
        """Add this step's seconds to `saved_s`; return the length of a chunk it covers, or 0."""
        assert self.seconds is not None
        price, several = self._chunk_to_save_for(context, wanted)
        self._budget.saved_s += self.seconds
        if self._budget.saved_s < price:
            return 0
        self._budget.saved_s = 0.0
        self.cause = "token"
        return several

    def _chunk_to_save_for(self, context: int, wanted: int) -> tuple[float, int]:
        """Return the seconds to save for a larger chunk, and the length of this chunk.

        The price is that of two chunks of one token.
        """
        price = 2 * self._coefficients.cost(context, 1, self._forwards)
        several = self._coefficients.largest_chunk(context, price, self._forwards) or 1
        foreseen = self._budget.model.largest_foreseen(context)
        return price, min(wanted, self.tokens, several, foreseen)

    def spend(self, context: int, length: int) -> None:
        self.tokens -= length
        if self.seconds is not None:
            self.seconds -= self._coefficients.cost(context, length, self._forwards)


class TimeBudget:
    """Decides how much time each step has for prompts, so that steps meet the stall target.

    `open` computes the room of each step, which is the time for prompts. A margin for the cost
    model's recent errors reduces the target first. From the reduced target, `open` subtracts the
    predicted time of the decode chunks, the usual time outside the runner, and the time of other
    engines on the same cores. If the decode chunks alone use up the target, prompts still get a
    fixed fraction (`prompt_share`) of the decode time. So prompts advance slowly instead of
    never.
    """

    def __init__(self, limits: Limits) -> None:
        self.model = CostModel()
        # A cost model for each kind of encoder unit. One timed piece is enough to predict the next
        # piece, because a piece of several units has at most twice the work of the largest timed
        # piece.
        self.encoders = defaultdict[int, CostModel](lambda: CostModel(1, 1))
        # The draft model's cost in decode steps. In steps with prompts, the draft model's time
        # belongs to the prompt's cost.
        self.draft = CostModel(1, 1)
        # The times of decode steps by number of rows; None if no guesses are allowed.
        self.rows = RowTimes() if limits.max_guess else None
        # How many steps missed the stall target, by cause.
        self.missed: Counter[str] = Counter()
        # Seconds saved for a chunk that takes longer than any single step has left for it.
        self.saved_s = 0.0
        # For how many seconds, until now, prompts have had only the guaranteed share of each step.
        self.starved_s = 0.0
        # How many forward passes each additional chunk adds to a step.
        self.forwards = int(limits.forward_per_chunk)
        self.is_whole = limits.is_whole
        self.elsewhere = Elsewhere()
        # Predicted seconds of the decode chunks alone, as of the last call of `open`.
        self.decode_s = 0.0
        # Whether a stall before the next step was counted already. If so, a late next step is not
        # counted.
        self._is_excused = False
        # The stall target in seconds; None if there is none. The default target follows the costs.
        self.stall_s = limits.max_stall_s
        self._limits = limits
        self._max_tokens = limits.max_step_tokens
        self._cold_tokens = COLD_TOKENS
        self._overheads: deque[float] = deque(maxlen=NUM_OVERHEADS)
        self._prompt_steps: deque[tuple[int, float]] = deque(maxlen=NUM_OVERHEADS)

    @property
    def overhead(self) -> float:
        """Return the median time that recent steps spent outside the runner, in seconds."""
        return median(self._overheads) if self._overheads else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Return the prompt tokens per second, averaged over recent steps with prompt tokens.

        Return 0 if no recent step had prompt tokens.
        """
        seconds = sum(seconds for _, seconds in self._prompt_steps)
        return sum(tokens for tokens, _ in self._prompt_steps) / seconds if seconds else 0.0

    def drop_savings(self) -> None:
        """Set the saved seconds to zero, because the prompt advances in this step anyway."""
        self.saved_s = 0.0

    def leave_room(self, elsewhere: Elsewhere) -> None:
        """Reserve time in later steps for the other engines on the same cores."""
        self.elsewhere = elsewhere

    def halve_tokens(self, at_least: int) -> bool:
        """Halve the token limit of steps until the engine restarts.

        Return False, and change nothing, if the limit would fall below `at_least`.
        """
        if self._max_tokens // 2 < at_least:
            return False
        self._max_tokens //= 2
        return True

    def seconds_alone(self, context: int, new: int) -> float:
        """Return the predicted seconds to process a prompt alone, in steps of the maximum size."""
        if not self.model.is_measured:
            return new / UNMEASURED_TOKENS_PER_S
        num_steps = -(-new // self._max_tokens)
        coefficients = self.model.coefficients
        reading_again = coefficients.g * (num_steps - 1) * (context + new / 2)
        return coefficients.c_prompt * num_steps + (coefficients.cost(context, new) + reading_again)

    def seconds_encoding(self, work: EncoderInput) -> float:
        """Return the predicted seconds to encode the input alone.

        Until enough encodings were timed, the prediction is a rough guess.
        """
        pieces = list(work.pieces(0, work.num_units))
        if not all(self.encoders[piece.stage.kind].is_measured for piece in pieces):
            return work.size / UNMEASURED_TOKENS_PER_S
        return sum(self.seconds_of_piece(work, piece) for piece in pieces)

    def seconds_of_piece(self, work: EncoderInput, piece: EncoderPiece) -> float:
        """Return the seconds that a piece adds to a step, including an error margin."""
        shape = StepShape()
        shape.encode(piece.stage.kind, piece.num_rows, work.size)
        return self._encoding_seconds(shape, with_margin=True)

    def units_within(self, room: float, work: EncoderInput, piece: EncoderPiece) -> int:
        """Return how many units of the piece's stage fit into `room` seconds.

        The first piece of a kind is one unit. Several units have at most twice the work of the
        largest timed piece of their kind. Short sources say little about long sources, so a row
        counts as work in proportion to the length of its source.
        """
        model = self.encoders[piece.stage.kind]
        most = max(1, 2 * model.most_pairs // max(1, piece.stage.num_rows * work.size))
        if not model.is_measured:
            return 1
        first, second = (
            self.seconds_of_piece(work, piece._replace(end=piece.start + num)) for num in (1, 2)
        )
        if room < first:
            return 0
        each = second - first
        return min(most, 1 + int((room - first) / each + 1e-9)) if each > 0 else most

    def _encoding_seconds(self, shape: StepShape, with_margin: bool = False) -> float:
        """Return the predicted seconds of the step's encoder pieces; 0 for unmeasured kinds."""
        seconds = 0.0
        for kind, piece in shape.encoded:
            model = self.encoders[kind]
            seconds += model.predict(piece) * (model.margin(True) if with_margin else 1.0)
        return seconds

    def seconds_drafting(self, drafted: StepShape | None, with_margin: bool = False) -> float:
        """Return the predicted seconds in the draft model; 0 if the model was not timed yet."""
        if drafted is None:
            return 0.0
        return self.draft.predict(drafted) * (self.draft.margin(True) if with_margin else 1.0)

    def seconds_hoped(self, drafted: StepShape | None) -> float:
        """Return the seconds to expect in the draft model when deciding whether to use the model.

        The result is the prediction at first. While the model is not used, the result slowly falls,
        so that the model is tried again.
        """
        return 0.0 if drafted is None else self.draft.hope(drafted)

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step in the runner; 0 if too few steps were timed."""
        computing = self.model.predict(shape) if self.model.is_measured else 0.0
        if computing and shape.drafted is not None:
            computing += self.seconds_drafting(shape.drafted)
        if not shape.encoded:
            return computing
        is_measured = all(self.encoders[kind].is_measured for kind, _ in shape.encoded)
        if not is_measured or (shape.num_new and not computing):
            return 0.0
        return computing + self._encoding_seconds(shape)

    def open(
        self,
        decoding: StepShape,
        is_awaited: bool,
        context: int = 0,
        part: float = 1.0,
        can_save: bool = True,
    ) -> Room:
        """Return the room that the decode chunks in `decoding` leave for prompts.

        `is_awaited` says whether a stream waits for the step. The first prompt has `context`
        processed tokens. `part` is the fraction of the target that the step may use. If `can_save`
        is true, the step may leave its room unused to save for a larger chunk.
        """
        tokens = max(1, self._max_tokens - decoding.num_new)
        elsewhere = self.elsewhere
        is_measured, coefficients = self.model.is_measured, self.model.coefficients
        self.decode_s = self._decode_seconds(coefficients, decoding) if is_measured else 0.0
        if is_measured and self._limits.is_default:
            self._choose_target(coefficients, context)
            if elsewhere.is_awaited:
                # A stream of another engine may have a target that its user has set.
                self.stall_s = self._limits.max_stall_s
        target = self._target(is_awaited or elsewhere.is_awaited)
        target = None if target is None else part * target
        if target is None:
            return Room(self, coefficients, tokens, None)
        if not is_measured:
            room = Room(self, coefficients, min(tokens, self._cold_tokens), None)
            room.target, room.is_awaited, room.can_save = target, is_awaited, can_save
            return room
        alone = self.decode_s
        left = target / self.model.margin(True) - self.overhead - alone
        # Engines on the same cores take turns, so a stream waits for one step of every engine.
        left = (left - elsewhere.decode_s) / (1 + elsewhere.num_with_prompts)
        share = part * self._limits.prompt_share * (alone + elsewhere.decode_s)
        tokens = min(tokens, 2 * self.model.largest_measured)
        room = Room(self, coefficients, tokens, max(left, share))
        room.is_awaited, room.can_save = is_awaited, can_save
        if is_awaited and left < share:
            room.cause = "decode"
        return room

    def _choose_target(self, coefficients: Coefficients, context: int) -> None:
        """Raise the default stall target if shorter steps would process prompts much more slowly.

        Each step first processes its decode chunks and reads the prompt's context again. So the
        shorter a step, the smaller is the part of its time in which prompts advance.
        """
        assert self._limits.max_stall_s is not None
        before = self.decode_s + self.elsewhere.decode_s + coefficients.c_prompt * self.forwards
        needed = coefficients.seconds_at_rate(DEFAULT_RATE, context, before, self._max_tokens)
        needed = self.model.margin(True) * (needed + self.overhead)
        self.stall_s = max(self._limits.max_stall_s, min(needed, MOST_DEFAULT_S))

    def _target(self, is_awaited: bool) -> float | None:
        return self.stall_s if is_awaited else self._limits.max_step_s

    def _decode_seconds(self, coefficients: Coefficients, decoding: StepShape) -> float:
        """Return the predicted seconds of the decode chunks in a forward pass with prompts."""
        if not self._limits.forward_per_chunk:
            decoding = replace(decoding, num_forwards=1)
        return coefficients.seconds(decoding, with_prompt=True)

    def excuse(self, cause: str) -> None:
        """Count a stall that happens before the next step.

        A miss in the next step is not counted as an error of the cost model.
        """
        self.missed[cause] += 1
        self._is_excused = True

    def expect_miss(self, shape: StepShape, cause: str, predicted: float) -> str:
        """Return why a step is expected to miss the target; "" if no miss is expected.

        Call this method only for a step that a stream waits for. Expected misses are counted by
        cause. `predicted` is the result of `predict` for the step. A step in which streams get no
        token always counts as a miss.
        """
        if cause not in WITHOUT_STREAMS:
            has_parts = shape.encoded or shape.drafted is not None
            computing = self.model.predict(shape) if has_parts else predicted
            if self.is_in_time(shape, computing):
                return ""
        cause = cause or "decode"
        self.missed[cause] += 1
        return cause

    def is_in_time(self, shape: StepShape, computing: float) -> bool:
        """Return whether a step is expected to meet the stall target.

        `computing` is the predicted time of the step's chunks, in seconds.
        """
        target = self.stall_s
        if target is None or not self.model.is_measured:
            return True
        margin = self.model.margin(shape.num_prompt_tokens > 0)
        seconds = margin * computing + self.overhead
        seconds += self._encoding_seconds(shape, with_margin=True)
        seconds += self.seconds_drafting(shape.drafted, with_margin=True)
        return seconds <= target * (1 + 1e-9)

    def learn_step(self, shape: StepShape, times: StepTimes, is_awaited: bool, cause: str) -> None:
        """Learn from a finished step; `cause` says why a miss of the target was expected."""
        computing, encoding, elapsed, loading, drafting = times
        inside = computing + sum(encoding) + loading + drafting
        self._overheads.append(max(0.0, elapsed - inside))
        target = self._target(is_awaited)
        is_late = is_awaited and target is not None and elapsed > target
        if is_late and not cause and not self._is_excused:
            self.missed["model"] += 1
        self._is_excused = False
        if shape.num_prompt_tokens:
            self._prompt_steps.append((shape.num_prompt_tokens, elapsed))
            is_starved = cause in ("decode", "token") and self._limits.prompt_share < 1
            self.starved_s = self.starved_s + elapsed if is_starved else 0.0
        self.learn_encoding(shape, encoding)
        if shape.drafted is not None:
            self.draft.observe(shape.drafted, drafting)
        elif shape.num_new and not shape.num_prompt_tokens:
            self.draft.forget()
        if shape.num_new:
            self.learn(shape, computing, is_awaited)

    def learn(self, shape: StepShape, seconds: float, is_awaited: bool = False) -> None:
        """Learn from the seconds that a step took in the runner.

        Until enough steps were timed, the number of prompt tokens per step is limited. A short
        step doubles the limit, and a long step halves the limit. So a few steps are enough to
        measure even a slow machine.
        """
        if shape.num_prompt_tokens and (target := self._target(is_awaited)) is not None:
            if seconds < target / 2:
                self._cold_tokens = max(self._cold_tokens, 2 * shape.num_prompt_tokens)
            elif seconds > target:
                half = max(1, shape.num_prompt_tokens // 2)
                self._cold_tokens = min(self._cold_tokens, half)
        self.model.observe(shape, seconds)

    def learn_encoding(self, shape: StepShape, seconds: Sequence[float]) -> None:
        """Learn from the seconds that each encoder piece took."""
        for (kind, piece), piece_s in zip(shape.encoded, seconds, strict=True):
            self.encoders[kind].observe(piece, piece_s)
