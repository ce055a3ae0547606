"""Predicts how long a step takes, with a linear model fitted to earlier steps.

The module reads no clock and decides nothing.
"""

from collections import deque
from dataclasses import dataclass
from math import isqrt, sqrt
from statistics import median
from typing import NamedTuple

RING_SIZE = 32
# A ring is a buffer for samples of similar steps. A ring with fewer samples than this accepts
# even outliers.
MIN_RING = 4
NUM_RATIOS = 64
OUTLIER = 3.0
DRIFT = 1.5
DRIFT_STEPS = 8
# The weight of the last step when the pace is updated. The pace is actual time / predicted time.
PACE_WEIGHT = 0.4
# At a pace from 1/USUAL to USUAL, the machine counts as running at its usual speed.
USUAL = 1.25
# The fraction by which each call of `forget` lowers a prediction, and the least share that is left.
FORGET, LEAST_HOPE = 1 / 256, 1 / 8
# Fit the coefficients again after this many new samples. A sample in a new ring causes an
# immediate fit.
REFIT_EVERY = 8
MEASURED_STEPS = 8
MEASURED_SIZES = 3
# This value is added to the diagonal of the normal equations (ridge regression). As a result,
# columns that always occur together share their weight.
RIDGE = 1e-9


@dataclass(slots=True)
class StepShape:
    """Holds sums over a step's chunks, from which the step's time is predicted.

    For each chunk, L is the number of tokens already processed and x is the number of new tokens.
    """

    num_forwards: int = 0
    num_context: int = 0  # Σ L
    num_new: int = 0  # Σ x
    num_pairs: int = 0  # Σ 2·L·x + x²
    # The part of num_new that belongs to prompt chunks.
    num_prompt_tokens: int = 0
    # The pieces of the step's encoder work, each with its kind. Each kind has its own cost model.
    encoded: tuple[tuple[int, "StepShape"], ...] = ()
    # The draft model's part of a decode step, whose time a separate cost model predicts.
    drafted: "StepShape | None" = None

    def encode(self, kind: int, num_rows: int, size: int) -> None:
        """Add a piece of encoder work: `num_rows` tokens, which attend to all `size` tokens."""
        pair = kind, StepShape(1, size, num_rows, num_rows * size, num_rows)
        self.encoded = *self.encoded, pair

    @property
    def num_encoded(self) -> int:
        return sum(shape.num_new for _, shape in self.encoded)

    def add(self, context: int, new: int, is_prompt: bool, forward_per_chunk: bool) -> None:
        if forward_per_chunk or not self.num_forwards:
            self.num_forwards += 1
        self.num_context += context
        self.num_new += new
        self.num_pairs += 2 * context * new + new * new
        self.num_prompt_tokens += new if is_prompt else 0

    def decode(self, num_chunks: int, num_context: int, forward_per_chunk: bool) -> None:
        """Count `num_chunks` decode chunks of one token each, before any other chunk is added.

        `num_context` is the sum of the chunks' contexts, the tokens already processed.
        """
        self.num_forwards = num_chunks if forward_per_chunk else 1
        self.num_context = num_context
        self.num_new = num_chunks
        self.num_pairs = 2 * num_context + num_chunks

    def go_back(self, start: int, num_tokens: int) -> None:
        """Make a chunk of one token start `num_tokens` tokens earlier, at token `start`."""
        self.num_context -= num_tokens
        self.num_new += num_tokens
        self.num_pairs += 2 * start * num_tokens + num_tokens * num_tokens

    def extend(self, context: int, new: int) -> None:
        """Add one token to a decode chunk that has `new` tokens so far."""
        self.num_new += 1
        self.num_pairs += 2 * (context + new) + 1

    def draft(self, context: int, num_read: int, num_chosen: int) -> None:
        """Count a draft: the draft model processes `num_read` tokens, then chooses `num_chosen`.

        `context` tokens precede them. Each chosen token but the first takes another forward pass,
        which all sequences share. Every token counts as a prompt token, so that the cost model
        has one kind of step.
        """
        if self.drafted is None:
            self.drafted = StepShape()
        drafted, num_more = self.drafted, max(0, num_chosen - 1)
        num_new = num_read + num_more
        drafted.num_forwards = max(drafted.num_forwards, 1 + num_more)
        drafted.num_context += context * (1 + num_more)
        drafted.num_new += num_new
        drafted.num_prompt_tokens += num_new
        drafted.num_pairs += 2 * context * num_new + num_new * num_new

    @property
    def ring(self) -> tuple[int, int]:
        """Return the key of the ring buffer that stores this step's sample.

        Steps with similar numbers of prompt tokens and of context tokens share a ring buffer. In
        a full ring buffer, a new sample replaces the oldest sample.
        """
        return self.num_prompt_tokens.bit_length(), self.num_context.bit_length()


@dataclass(slots=True, frozen=True)
class Coefficients:
    """Holds the coefficients of t = c·forwards + g·ΣL + b·Σx + a·Σ(2·L·x + x²), in seconds.

    The fixed cost of a forward pass is c; steps with and without prompt tokens have separate
    values. The cost of reading a cached token is g. The cost of a new token is b, and attention
    for a pair of tokens costs a.
    """

    c_decode: float = 0.0
    c_prompt: float = 0.0
    g: float = 0.0
    b: float = 0.0
    a: float = 0.0

    def seconds(self, shape: StepShape, with_prompt: bool) -> float:
        c = self.c_prompt if with_prompt else self.c_decode
        rest = self.g * shape.num_context + self.b * shape.num_new + self.a * shape.num_pairs
        return c * shape.num_forwards + rest

    def scaled(self, factor: float) -> "Coefficients":
        return Coefficients(
            c_decode=factor * self.c_decode,
            c_prompt=factor * self.c_prompt,
            g=factor * self.g,
            b=factor * self.b,
            a=factor * self.a,
        )

    def cost(self, context: int, new: int, forwards: int = 0) -> float:
        """Return the seconds that a prompt chunk and its forward passes add to a step."""
        linear = self.g * context + self.b * new + self.c_prompt * forwards
        return linear + self.a * new * (2 * context + new)

    def seconds_at_rate(
        self, fraction: float, context: int, before: float, max_tokens: int
    ) -> float:
        """Return how long a step must be to process a prompt at `fraction` of the best rate.

        The step processes other chunks for `before` seconds, and x tokens of the prompt after
        `context` tokens. So the step takes t(x) = before + g·L + (b + 2·a·L)·x + a·x² seconds, and
        its rate is x / t(x). The best rate is the largest rate for any x up to `max_tokens`.
        """
        fixed, each = before + self.g * context, self.b + 2 * self.a * context
        best = min(max_tokens, sqrt(fixed / self.a)) if self.a else max_tokens
        seconds = fixed + each * best + self.a * best * best
        if not seconds:
            return 0.0
        rate = fraction * best / seconds
        # The smaller root of a·rate·x² - slope·x + fixed·rate = 0 is the x with this rate.
        slope = 1 - each * rate
        root = sqrt(max(0.0, slope * slope - 4 * self.a * rate * rate * fixed))
        return 2 * fixed / (slope + root)

    def largest_chunk(self, context: int, room: float, forwards: int = 0) -> int | None:
        """Return how many new tokens cost at most `room` seconds; None if any number fits.

        Solves g·L + b·x + a·(2·L·x + x²) = room - c·forwards for x, where L is `context`.
        """
        left = room - self.g * context - self.c_prompt * forwards
        slope = self.b + 2 * self.a * context
        if left < 0:
            return 0
        if self.a * left > 1e-12 * slope * slope:
            x = (sqrt(slope * slope + 4 * self.a * left) - slope) / (2 * self.a)
        elif slope:
            x = left / slope
        else:
            return None
        return int(x + 1e-9)


class Sample(NamedTuple):
    """Holds the shape of a timed step, and its seconds converted to the machine's usual speed."""

    shape: StepShape
    seconds: float


class CostModel:
    """Learns the coefficients from timed steps, and measures the errors of predictions.

    A shared machine can be slow for some seconds. So the model learns two things separately. The
    coefficients describe the machine's usual speed. The pace is a factor that says how much
    slower or faster the last steps were. To predict a step's time, the model multiplies the time
    at usual speed by the pace. If the pace is unusual, the time of a step is divided by the pace
    before the time is stored. So a slow period does not spoil the coefficients.

    Steps with and without prompt tokens have separate paces, because the coefficients can fit
    these two kinds of steps differently well. Samples are stored in rings by size of the step, so
    thousands of small steps do not displace the few large steps. A least-squares fit over all
    rings gives the coefficients. If all of the last DRIFT_STEPS steps were much slower than the
    pace, or all much faster, the pace is set to the median of these steps.
    """

    def __init__(self, num_steps: int = MEASURED_STEPS, num_sizes: int = MEASURED_SIZES) -> None:
        """Create a model that is measured after `num_steps` prompt steps of `num_sizes` sizes."""
        self._num_steps, self._num_sizes = num_steps, num_sizes
        # Whether enough steps were timed to trust the coefficients.
        self.is_measured = False
        self._fitted = Coefficients()
        # The pace after the last step without prompt tokens (False), and after the last step with
        # prompt tokens (True).
        self._paces = {False: 1.0, True: 1.0}
        self._last_kind = True
        # The largest number of prompt tokens in any timed step.
        self.largest_measured = 0
        # The largest `num_pairs` of any timed step with prompt tokens.
        self.most_pairs = 0
        self._rings: dict[tuple[int, int], deque[Sample]] = {}
        self._fit = LeastSquares(5)
        # The kinds of steps among the samples: without prompt tokens (False), with prompt tokens
        # (True).
        self._kinds: set[bool] = set()
        self._num_new = 0
        self._num_prompt_steps = 0
        self._prompt_sizes: set[int] = set()
        self._ratios: dict[bool, deque[float]] = {
            False: deque(maxlen=NUM_RATIOS),
            True: deque(maxlen=NUM_RATIOS),
        }
        self._drift: deque[float] = deque(maxlen=DRIFT_STEPS)
        # The share of the predictions that `hope` returns. The next timed step resets it to 1.
        self._hope = 1.0

    @property
    def coefficients(self) -> Coefficients:
        """Return the coefficients for a step with prompt tokens, at the current pace."""
        return self._fitted.scaled(self._pace(True))

    def predict(self, shape: StepShape) -> float:
        with_prompt = shape.num_prompt_tokens > 0
        return self._pace(with_prompt) * self._fitted.seconds(shape, with_prompt)

    def hope(self, shape: StepShape) -> float:
        """Return the predicted seconds, lowered by each `forget` since the last timed step."""
        return self._hope * self.predict(shape)

    def forget(self) -> None:
        """Slightly lower the result of `hope`, after a step without work of this kind.

        The cost model only learns from work that is done. So work that once took too long to be
        worth doing would never be tried again, even after it has become fast. If `hope` is more
        than USUAL times lower than the prediction, only the next timed step decides the pace.
        """
        self._hope = max(LEAST_HOPE, self._hope * (1 - FORGET))

    def largest_foreseen(self, context: int) -> int:
        """Return the maximum length of a chunk after `context` processed tokens.

        The model extrapolates to at most four times the token pairs of any timed step. Short
        contexts say nothing about long contexts: after 100,000 tokens, one token can cost a
        hundred times as much. For the first chunk of a prompt, four times the pairs means twice
        the tokens.
        """
        return max(1, isqrt(context * context + 4 * self.most_pairs) - context)

    def margin(self, with_prompt: bool) -> float:
        """Return the 95th percentile of actual time / predicted time, limited to [1, 2].

        Only recent steps with prompt tokens count, or only recent steps without prompt tokens.
        """
        ratios = sorted(self._ratios[with_prompt])
        if not ratios:
            return 1.0
        return min(2.0, max(1.0, ratios[int(0.95 * (len(ratios) - 1))]))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took `seconds` in the runner."""
        if seconds <= 0:
            return
        with_prompt = shape.num_prompt_tokens > 0
        if with_prompt:
            self._num_prompt_steps += 1
            self._prompt_sizes.add(shape.num_prompt_tokens.bit_length())
            self.largest_measured = max(self.largest_measured, shape.num_prompt_tokens)
            self.most_pairs = max(self.most_pairs, shape.num_pairs)
            self.is_measured = (
                self._num_prompt_steps >= self._num_steps
                and len(self._prompt_sizes) >= self._num_sizes
            )
        pace = self._pace(with_prompt)
        predicted = pace * self._fitted.seconds(shape, with_prompt)
        ratio = seconds / predicted if predicted > 0 else 1.0
        if self._hope < 1 / USUAL:
            pace, ratio = pace * ratio, 1.0
            self._paces[with_prompt] = pace
            self._drift.clear()
        self._hope = 1.0
        is_plausible = 1 / OUTLIER <= ratio <= OUTLIER
        if self.is_measured:
            self._ratios[with_prompt].append(ratio)
            pace = self._follow(with_prompt, pace, ratio, is_plausible)
        ring = self._rings.setdefault(shape.ring, deque())
        is_new_region = len(ring) < MIN_RING
        if is_new_region or not self.is_measured or is_plausible:
            is_usual = 1 / USUAL <= pace <= USUAL
            self._keep(ring, Sample(shape, seconds if is_usual else seconds / pace))
        if is_new_region or self._num_new >= REFIT_EVERY:
            self._refit()

    def _pace(self, with_prompt: bool) -> float:
        """Return the pace to expect for the next step of this kind.

        If the last step was of the other kind, a slow pace of this kind is outdated, and a slow
        pace of the other kind counts instead. A fast pace of the other kind does not count,
        because the coefficients may be wrong for the other kind alone.
        """
        own, other = self._paces[with_prompt], self._paces[not with_prompt]
        return own if with_prompt == self._last_kind else max(other, 1.0) * min(own, 1.0)

    def _follow(self, with_prompt: bool, pace: float, ratio: float, is_plausible: bool) -> float:
        """Move this kind's pace towards the pace of the last step, and return the new pace.

        If all recent steps were much slower than the pace, or all much faster, set the paces of
        both kinds to the median of these steps.
        """
        self._drift.append(pace * ratio)
        if is_plausible:
            pace += PACE_WEIGHT * pace * (ratio - 1)
        self._paces[with_prompt], self._last_kind = pace, with_prompt
        is_full = len(self._drift) == DRIFT_STEPS
        if is_full and (min(self._drift) > DRIFT * pace or max(self._drift) < pace / DRIFT):
            self._paces = dict.fromkeys(self._paces, median(self._drift))
            self._drift.clear()
            for ratios in self._ratios.values():
                ratios.clear()
        return self._paces[with_prompt]

    def _keep(self, ring: deque[Sample], sample: Sample) -> None:
        if len(ring) == RING_SIZE:
            self._weigh(ring.popleft(), sign=-1)
        ring.append(sample)
        self._weigh(sample, sign=1)
        self._num_new += 1

    def _weigh(self, sample: Sample, sign: int) -> None:
        """Add a sample to the fit, or remove the sample if `sign` is -1.

        The fit minimizes relative errors, so short steps matter as much as long steps.
        """
        shape = sample.shape
        with_prompt = shape.num_prompt_tokens > 0
        row = [
            0.0 if with_prompt else float(shape.num_forwards),
            float(shape.num_forwards) if with_prompt else 0.0,
            float(shape.num_context),
            float(shape.num_new),
            float(shape.num_pairs),
        ]
        self._kinds.add(with_prompt)
        self._fit.add(row, sample.seconds, sign / sample.seconds**2)

    def _refit(self) -> None:
        c_decode, c_prompt, g, b, a = self._fit.solve()
        if False not in self._kinds:
            c_decode = c_prompt
        elif True not in self._kinds:
            c_prompt = c_decode
        self._fitted = Coefficients(c_decode, c_prompt, g, b, a)
        self._num_new = 0


class LeastSquares:
    """Holds the normal equations of all rows that were added and not removed."""

    def __init__(self, num_columns: int) -> None:
        self._columns = range(num_columns)
        self._matrix = [[0.0] * num_columns for _ in self._columns]
        self._target = [0.0] * num_columns

    def add(self, row: list[float], value: float, weight: float) -> None:
        """Add a row to the equations; an equal row with the negative weight removes the row."""
        for i in self._columns:
            if row[i]:
                scaled = row[i] * weight
                self._target[i] += scaled * value
                matrix_row = self._matrix[i]
                for j in self._columns:
                    matrix_row[j] += scaled * row[j]

    def solve(self) -> list[float]:
        """Return a coefficient of at least 0 for each column.

        A column without data gets 0. While any coefficient is negative, the column with the most
        negative coefficient is dropped and gets 0. The columns are scaled to equal length,
        because the sizes of their numbers differ widely.
        """
        scale = [max(self._matrix[i][i], 0.0) ** 0.5 or 1.0 for i in self._columns]
        target = [self._target[i] / scale[i] for i in self._columns]
        matrix = [
            [self._matrix[i][j] / (scale[i] * scale[j]) for j in self._columns]
            for i in self._columns
        ]
        solution = [0.0] * len(target)
        columns = [i for i in self._columns if self._matrix[i][i] > 0]
        while columns:
            values = _eliminate(matrix, target, columns)
            worst = min(range(len(columns)), key=values.__getitem__)
            if values[worst] >= 0:
                for i, value in zip(columns, values, strict=True):
                    solution[i] = value / scale[i]
                break
            del columns[worst]
        return solution


def _eliminate(matrix: list[list[float]], target: list[float], columns: list[int]) -> list[float]:
    """Solve the equations of these columns by Gaussian elimination, with RIDGE on the diagonal."""
    size = len(columns)
    rows = [[matrix[i][j] for j in columns] + [target[i]] for i in columns]
    for k in range(size):
        rows[k][k] += RIDGE
    for k in range(size):
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    values = [0.0] * size
    for k in reversed(range(size)):
        known = 0.0
        for j in range(k + 1, size):
            known += rows[k][j] * values[j]
        values[k] = (rows[k][size] - known) / rows[k][k]
    return values
