"""How long a step takes, fitted to the steps so far; knows no clock and sets no budget."""

from collections import deque
from dataclasses import dataclass
from math import isqrt, sqrt
from statistics import median
from typing import NamedTuple

RING_SIZE = 32
MIN_RING = 4  # a ring with fewer samples is new to the model, which rejects none of them
NUM_RATIOS = 64
OUTLIER = 3.0
DRIFT = 1.5
DRIFT_STEPS = 8
PACE_WEIGHT = 0.4  # of the last step
USUAL = 1.25  # a pace between its inverse and itself is the machine's usual speed
REFIT_EVERY = 8  # samples of known rings
MEASURED_STEPS = 8
MEASURED_SIZES = 3
RIDGE = 1e-9  # lets columns that always occur together share their weight


@dataclass(slots=True)
class StepShape:
    """The figures that decide a step's time; L: tokens already computed, x: new, per chunk."""

    num_forwards: int = 0
    num_context: int = 0  # Σ L
    num_new: int = 0  # Σ x
    num_pairs: int = 0  # Σ 2·L·x + x²
    num_prompt_tokens: int = 0  # the part of num_new in prompt chunks
    num_encoded: int = 0  # Σ size of the encoder's units, which have a cost model of their own
    num_encoded_pairs: int = 0  # Σ size²

    def encode(self, size: int, num_units: int) -> None:
        self.num_encoded += size * num_units
        self.num_encoded_pairs += size * size * num_units

    @property
    def encoding(self) -> "StepShape":
        """The encoder's part, as its own model takes it."""
        return StepShape(1, 0, self.num_encoded, self.num_encoded_pairs, self.num_encoded)

    def add(self, context: int, new: int, is_prompt: bool, forward_per_chunk: bool) -> None:
        if forward_per_chunk or not self.num_forwards:
            self.num_forwards += 1
        self.num_context += context
        self.num_new += new
        self.num_pairs += 2 * context * new + new * new
        self.num_prompt_tokens += new if is_prompt else 0

    def decode(self, num_chunks: int, num_context: int, forward_per_chunk: bool) -> None:
        """Chunks of one token, before all others; `num_context` is the sum of theirs."""
        self.num_forwards = num_chunks if forward_per_chunk else 1
        self.num_context = num_context
        self.num_new = num_chunks
        self.num_pairs = 2 * num_context + num_chunks

    def go_back(self, start: int, num_tokens: int) -> None:
        """A chunk of one token begins so many before it, at `start`."""
        self.num_context -= num_tokens
        self.num_new += num_tokens
        self.num_pairs += 2 * start * num_tokens + num_tokens * num_tokens

    def extend(self, context: int, new: int) -> None:
        """One token more in a chunk of `new` tokens that is not a prompt's."""
        self.num_new += 1
        self.num_pairs += 2 * (context + new) + 1

    @property
    def ring(self) -> tuple[int, int]:
        """Steps that age together: alike in prompt tokens and context."""
        return self.num_prompt_tokens.bit_length(), self.num_context.bit_length()


@dataclass(slots=True, frozen=True)
class Coefficients:
    """t = c + g·ΣL + b·Σx + a·Σ(2·L·x + x²), in seconds; c once per forward."""

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
        """Seconds that one prompt chunk adds to a step, with the forwards that it adds."""
        linear = self.g * context + self.b * new + self.c_prompt * forwards
        return linear + self.a * new * (2 * context + new)

    def largest_chunk(self, context: int, room: float, forwards: int = 0) -> int | None:
        """Largest number of new tokens that cost no more than `room`; None: any number.

        Solves g·L + b·x + a·(2·L·x + x²) = room for x; L: context tokens already computed.
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
    """A timed step; the seconds are those at the machine's usual speed."""

    shape: StepShape
    seconds: float


class CostModel:
    """Coefficients, and how far to trust them.

    A shared machine is slow for seconds at a time, so the coefficients describe its usual speed.
    A step at another speed is kept with the time it would have taken at that one. The pace is how
    long the last steps took relative to the coefficients; the next step is expected to match it.
    Steps with prompt tokens have a pace of their own, since the coefficients may be off by more
    for one kind than for the other.
    """

    def __init__(self) -> None:
        self.is_measured = False  # whether enough steps were timed to trust the coefficients
        self._fitted = Coefficients()
        self._paces = {False: 1.0, True: 1.0}  # after the last step without and with prompt tokens
        self._last_kind = True
        self.largest_measured = 0  # prompt tokens in one step
        self.most_pairs = 0  # of one that had any
        self._rings: dict[tuple[int, int], deque[Sample]] = {}
        self._fit = LeastSquares(5)
        self._kinds: set[bool] = set()  # of the samples: with prompt tokens or without
        self._num_new = 0
        self._num_prompt_steps = 0
        self._prompt_sizes: set[int] = set()
        self._ratios: dict[bool, deque[float]] = {
            False: deque(maxlen=NUM_RATIOS),
            True: deque(maxlen=NUM_RATIOS),
        }
        self._drift: deque[float] = deque(maxlen=DRIFT_STEPS)

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients of a step with prompt tokens."""
        return self._fitted.scaled(self._pace(True))

    def predict(self, shape: StepShape) -> float:
        with_prompt = shape.num_prompt_tokens > 0
        return self._pace(with_prompt) * self._fitted.seconds(shape, with_prompt)

    def largest_foreseen(self, context: int) -> int:
        """The largest chunk behind `context` tokens whose pairs are not far from all measured ones.

        Short contexts say nothing of long ones: behind 100,000 a token may cost a hundred times as
        much. Four times the pairs are twice the tokens of a prompt's first chunk.
        """
        return max(1, isqrt(context * context + 4 * self.most_pairs) - context)

    def margin(self, with_prompt: bool) -> float:
        """95th percentile of actual over predicted in recent steps of the kind, from 1 to 2."""
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
                self._num_prompt_steps >= MEASURED_STEPS
                and len(self._prompt_sizes) >= MEASURED_SIZES
            )
        pace = self._pace(with_prompt)
        predicted = pace * self._fitted.seconds(shape, with_prompt)
        ratio = seconds / predicted if predicted > 0 else 1.0
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
        """The pace to expect of a step.

        Steps of the other kind tell that the machine is slower than usual, or no longer: never
        that it is faster, which may be the coefficients' error for that kind alone.
        """
        own, other = self._paces[with_prompt], self._paces[not with_prompt]
        return own if with_prompt == self._last_kind else max(other, 1.0) * min(own, 1.0)

    def _follow(self, with_prompt: bool, pace: float, ratio: float, is_plausible: bool) -> float:
        """Adapt the pace to a step; jump if the last ones were all off in the same direction.

        Returns the new pace of steps of this kind.
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
        """Fit relative errors, so short steps matter as much as long ones."""
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
    """Keeps the normal equations of all rows added and not removed."""

    def __init__(self, num_columns: int) -> None:
        self._columns = range(num_columns)
        self._matrix = [[0.0] * num_columns for _ in self._columns]
        self._target = [0.0] * num_columns

    def add(self, row: list[float], value: float, weight: float) -> None:
        """Add a row; a negative weight takes an equal one out again."""
        for i in self._columns:
            if row[i]:
                scaled = row[i] * weight
                self._target[i] += scaled * value
                line = self._matrix[i]
                for j in self._columns:
                    line[j] += scaled * row[j]

    def solve(self) -> list[float]:
        """Coefficients of all columns; 0 for a column without data.

        Drops the most negative column until none is negative. Columns are scaled to equal length
        because their sizes differ widely.
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
    """Gaussian elimination with a trace of ridge."""
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
