"""Owns the inner loops of the delta rule, which need explicit vectors: one token, 32 columns."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.runner.kernels.tiles import (
    FLOATS,
    LANES,
    Matrix,
    add_product,
    load,
    loop,
    spread_over,
)

COLUMNS = 2 * LANES  # of a tile
ROWS = 4  # that are summed side by side, so that sums do not wait for each other
_F32, _I64 = ir.FloatType(), ir.IntType(64)
_FAST = ("nsz", "arcp", "contract", "afn", "reassoc")


class _Token:
    """One token's numbers, and what loops over the rows of the tile make of them."""

    def __init__(self, builder: Any, state: Matrix, qkv: list[Matrix], at: Any) -> None:
        self._builder, self._state = builder, state
        self._q, self._k, self._v = qkv
        self._token, column = cgutils.unpack_tuple(builder, at)
        self.columns = [builder.add(column, _I64(LANES * half)) for half in range(2)]

    def sum_rows(self, body: Callable[[Any, list[Any], list[Any]], list[Any]]) -> list[Any]:
        """The columns' sums of what `body` adds, of a row's number, its two places and two sums."""
        b = self._builder
        none = ir.Constant(FLOATS, [0.0] * LANES)

        def step(at: Any, sums: list[Any]) -> list[Any]:
            following, first = [], b.mul(at, _I64(ROWS))
            for n in range(ROWS):
                row = b.add(first, _I64(n))
                begin = self._state.at(row, _I64(0))
                places = [b.add(begin, _I64(4 * LANES * half)) for half in range(2)]
                following += body(row, places, sums[2 * n : 2 * n + 2])
            return following

        sums = loop(b, b.udiv(self._state.shape[0], _I64(ROWS)), [none] * (2 * ROWS), step)
        while len(sums) > 2:
            pairs = zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)
            sums = [b.fadd(x, y, flags=_FAST) for x, y in pairs]
        return sums

    def find(self, row: Any, places: list[Any], sums: list[Any]) -> list[Any]:
        """Adds the row, times its number of the key."""
        key = self._number(self._k, row)
        vectors = [load(self._builder, place, FLOATS, 4) for place in places]
        pairs = zip(sums, vectors, strict=True)
        return [add_product(self._builder, total, vector, key) for total, vector in pairs]

    def moves(self, found: list[Any], by: list[Any]) -> list[Any]:
        """By how much each column is corrected, for a number of the key that is 1."""
        kept, k_scale, beta, _ = by
        known, result = self.times(kept, k_scale), []
        for column, part in zip(self.columns, found, strict=True):
            wanted = load(self._builder, self._v.at(self._token, column), FLOATS, 4)
            missing = self._builder.fsub(wanted, self.times(part, known), flags=_FAST)
            result.append(self.times(self.times(missing, beta), k_scale))
        return result

    def move(self, kept: Any, moves: list[Any]) -> Callable[[Any, list[Any], list[Any]], list[Any]]:
        """What moves a row on, and adds it, times its number of the query."""
        b = self._builder

        def body(row: Any, places: list[Any], sums: list[Any]) -> list[Any]:
            key, query = self._number(self._k, row), self._number(self._q, row)
            following = []
            for place, total, by in zip(places, sums, moves, strict=True):
                vector = add_product(b, self.times(load(b, place, FLOATS, 4), kept), by, key)
                b.store(vector, b.inttoptr(place, FLOATS.as_pointer()), align=4)
                following.append(add_product(b, total, vector, query))
            return following

        return body

    def times(self, x: Any, y: Any) -> Any:
        return self._builder.fmul(x, y, flags=_FAST)

    def store(self, out: Matrix, vectors: list[Any]) -> None:
        for column, vector in zip(self.columns, vectors, strict=True):
            place = self._builder.inttoptr(out.at(self._token, column), FLOATS.as_pointer())
            self._builder.store(vector, place, align=4)

    def _number(self, x: Matrix, row: Any) -> Any:
        return spread_over(self._builder, load(self._builder, x.at(self._token, row), _F32, 4))


def _emit_delta_tile(typing_context: Any, state: Any, qkv: Any, out: Any, at: Any, by: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, parts = signature.args[1], cgutils.unpack_tuple(builder, args[1])
        inputs = [Matrix(context, builder, *pair) for pair in zip(kinds, parts, strict=True)]
        tile, results = (Matrix(context, builder, signature.args[i], args[i]) for i in (0, 2))
        factors = [spread_over(builder, x) for x in cgutils.unpack_tuple(builder, args[4])]
        token = _Token(builder, tile, inputs, args[3])
        moves = token.moves(token.sum_rows(token.find), factors)
        read = token.sum_rows(token.move(factors[0], moves))
        token.store(results, [token.times(part, factors[3]) for part in read])
        return context.get_dummy_value()

    return types.void(state, qkv, out, at, by), emit


delta_tile: Any = intrinsic(_emit_delta_tile)
"""delta_tile(state, (q, k, v), out, (token, column), (kept, k_scale, beta, q_scale)).

The formulas of models/delta_rule.py for one token and 32 columns of a head: state [key_dim, 32] is
moved on, and out [tokens, value_dim] gets what the query then finds. q, k and v are not scaled;
their scales, the factor that the state keeps and beta are. All are float32 with contiguous rows,
key_dim a multiple of 4.
"""
