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

        The worst of the columns that would turn negative leaves, until none would. Columns are
        scaled to equal length, being of very different sizes.
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
