"""Least squares with coefficients that are never negative; plain lists for a few columns."""

TOLERANCE = 1e-9


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
        """Coefficients of all columns; 0 for a column that nothing speaks for.

        Lawson and Hanson's active set, on columns scaled to equal length.
        """
        scale = [max(self._matrix[i][i], 0.0) ** 0.5 or 1.0 for i in self._columns]
        matrix = [
            [self._matrix[i][j] / (scale[i] * scale[j]) for j in self._columns]
            for i in self._columns
        ]
        target = [self._target[i] / scale[i] for i in self._columns]
        largest = max(map(abs, target)) or 1.0
        solution = [0.0] * len(target)
        active: list[int] = []
        for _ in range(3 * len(target)):
            slopes = [
                t - sum(map(_product, line, solution))
                for t, line in zip(target, matrix, strict=True)
            ]
            idle = [i for i in self._columns if i not in active]
            best = max(idle, key=slopes.__getitem__, default=-1)
            if best < 0 or slopes[best] <= TOLERANCE * largest:
                break
            active.append(best)
            solution = _settle(matrix, target, solution, active)
        return [value / factor for value, factor in zip(solution, scale, strict=True)]


def _product(left: float, right: float) -> float:
    return left * right


def _settle(
    matrix: list[list[float]], target: list[float], solution: list[float], active: list[int]
) -> list[float]:
    """Solve for the active columns; those that would turn negative leave `active`."""
    while True:
        values = dict(zip(active, _eliminate(matrix, target, active), strict=True))
        negative = [i for i in active if values[i] <= 0]
        if not negative:
            return [values.get(i, 0.0) for i in range(len(target))]
        step = min(
            solution[i] / (solution[i] - values[i]) if solution[i] else 0.0 for i in negative
        )
        solution = [s + step * (values.get(i, 0.0) - s) for i, s in enumerate(solution)]
        lost = [i for i in negative if solution[i] <= TOLERANCE]
        for i in lost or negative:
            active.remove(i)
            solution[i] = 0.0
        if not active:
            return solution


def _eliminate(matrix: list[list[float]], target: list[float], columns: list[int]) -> list[float]:
    """Gauss with a trace of ridge, so that columns that only ever came together share."""
    size = len(columns)
    rows = [[matrix[i][j] for j in columns] + [target[i]] for i in columns]
    for k in range(size):
        rows[k][k] += TOLERANCE
    for k in range(size):
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    values = [0.0] * size
    for k in reversed(range(size)):
        known = sum(rows[k][j] * values[j] for j in range(k + 1, size))
        values[k] = (rows[k][size] - known) / rows[k][k]
    return values
