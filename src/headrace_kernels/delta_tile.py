"""Emits the inner loops of the delta rule, which need explicit vectors."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.registers import HAS_512
from headrace_kernels.tiles import (
    FLOATS,
    LANES,
    Matrix,
    fetch,
    fused,
    load,
    loop,
    spread_over,
)

# Vectors in a row of a tile. With 512 bits, a row has four vectors, so that no sum waits for
# another sum. With 256 bits, a vector takes two registers. A row of one vector needs 10 of the 16
# registers: 4 for two sums, 2 for the correction, 1 for the decay and 3 for numbers of q and k.
_VECTORS = 4 if HAS_512 else 1
COLUMNS = _VECTORS * LANES  # columns of a tile
_AHEAD = 3  # distance of prefetches, in tokens
_F32, _I64 = ir.FloatType(), ir.IntType(64)
Vectors = list[Any]
"""One number for each column of a tile, in several vectors."""


class _Tile:
    """One tile of a state, with the loops over its rows.

    A step of the rule would need two passes over the state. The first pass finds the value that the
    state predicts for the token's key. The second pass updates the state and computes the output
    for the query. `move` does the second pass and also finds the prediction for the following
    token's key. So each token costs one pass, and only the first token needs `find`.
    """

    def __init__(self, builder: Any, state: Matrix, qkv: list[Matrix], column: Any) -> None:
        self._builder, self._state = builder, state
        self._q, self._k, self._v = qkv
        self._columns = [builder.add(column, _I64(LANES * n)) for n in range(_VECTORS)]

    def find(self, token: Any) -> Vectors:
        """Return the value that the state predicts for the token's key."""

        def body(row: Any, places: list[Any]) -> list[list[tuple[Any, Any]]]:
            key = self._number(self._k, token, row)
            return [[(load(self._builder, place, FLOATS, 4), key) for place in places]]

        return self._pass(1, body)[0]

    def move(self, token: Any, following: Any, kept: Any, moves: Vectors) -> list[Vectors]:
        """Update all rows. Return the new state's products with the query and the following key.

        kept: the factor that scales the old state. moves: the correction of each column, which is
        multiplied with the key.
        """
        b = self._builder

        def body(row: Any, places: list[Any]) -> list[list[tuple[Any, Any]]]:
            key, query = self._number(self._k, token, row), self._number(self._q, token, row)
            later, vectors = self._number(self._k, following, row), []
            for place, by in zip(places, moves, strict=True):
                vector = fused(b, by, key, self.times(load(b, place, FLOATS, 4), kept))
                b.store(vector, b.inttoptr(place, FLOATS.as_pointer()), align=4)
                vectors.append(vector)
            return [[(vector, by) for vector in vectors] for by in (query, later)]

        return self._pass(2, body)

    def moves(self, token: Any, found: Vectors, by: list[Any]) -> Vectors:
        """Return the correction of each column, before it is multiplied with the token's key."""
        kept, k_scale, beta, _ = by
        known, result = self.times(kept, k_scale), []
        for column, part in zip(self._columns, found, strict=True):
            wanted = load(self._builder, self._v.at(token, column), FLOATS, 4)
            missing = self._builder.fsub(wanted, self.times(part, known))
            result.append(self.times(self.times(missing, beta), k_scale))
        return result

    def times(self, x: Any, y: Any) -> Any:
        return self._builder.fmul(x, y)

    def prefetch(self, token: Any, out: Matrix) -> None:
        """Prefetch the rows that the token reads and writes.

        The rows of successive tokens are pages apart, so the hardware does not prefetch them.
        """
        b = self._builder

        def body(at: Any, values: list[Any]) -> list[Any]:
            for x in (self._q, self._k):
                fetch(b, x.at(token, b.mul(at, _I64(LANES))))
            return []

        loop(b, b.udiv(b.add(self._state.shape[0], _I64(LANES - 1)), _I64(LANES)), [], body)
        for column in self._columns:
            fetch(b, self._v.at(token, column))
            fetch(b, out.at(token, column))

    def store(self, out: Matrix, token: Any, vectors: Vectors) -> None:
        for column, vector in zip(self._columns, vectors, strict=True):
            place = self._builder.inttoptr(out.at(token, column), FLOATS.as_pointer())
            self._builder.store(vector, place, align=4)

    def _pass(self, count: int, body: Callable[[Any, list[Any]], Any]) -> list[Vectors]:
        """Sum products over the rows of the tile.

        For each row, `body` returns `count` lists of pairs of factors, one pair for each vector
        of a sum. The order of additions is fixed, so a sum has the same bits whether or not the
        pass computes other sums.
        """
        b = self._builder

        def step(row: Any, sums: list[Any]) -> list[Any]:
            begin = self._state.at(row, _I64(0))
            places = [b.add(begin, _I64(4 * LANES * n)) for n in range(_VECTORS)]
            products = [pair for pairs in body(row, places) for pair in pairs]
            return [fused(b, x, y, z) for (x, y), z in zip(products, sums, strict=True)]

        none = ir.Constant(FLOATS, [0.0] * LANES)
        sums = loop(b, self._state.shape[0], [none] * (_VECTORS * count), step)
        return [sums[i * _VECTORS : (i + 1) * _VECTORS] for i in range(count)]

    def _number(self, x: Matrix, token: Any, row: Any) -> Any:
        return spread_over(self._builder, load(self._builder, x.at(token, row), _F32, 4))


def _emit_delta_tile(typing_context: Any, state: Any, qkv: Any, out: Any, at: Any, by: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, kinds = builder, signature.args[1]
        parts = cgutils.unpack_tuple(b, args[1])
        inputs = [Matrix(context, b, *pair) for pair in zip(kinds, parts, strict=True)]
        state, out, by = (Matrix(context, b, signature.args[i], args[i]) for i in (0, 2, 4))
        first, count, column = cgutils.unpack_tuple(b, args[3])
        tile, last = _Tile(b, state, inputs, column), b.sub(count, _I64(1))

        def body(at: Any, found: Vectors) -> Vectors:
            token, is_last = b.add(first, at), b.icmp_signed("==", at, last)
            following = b.select(is_last, token, b.add(token, _I64(1)))
            is_near = b.icmp_signed("<", b.add(at, _I64(_AHEAD)), count)
            tile.prefetch(b.add(token, b.select(is_near, _I64(_AHEAD), _I64(0))), out)
            places = [by.at(at, _I64(n)) for n in range(4)]
            factors = [spread_over(b, load(b, place, _F32, 4)) for place in places]
            moves = tile.moves(token, found, factors)
            read, found = tile.move(token, following, factors[0], moves)
            tile.store(out, token, [tile.times(part, factors[3]) for part in read])
            return found

        loop(b, count, tile.find(first), body)
        return context.get_dummy_value()

    return types.void(state, qkv, out, at, by), emit


delta_tile: Any = intrinsic(_emit_delta_tile)
"""delta_tile(state, (q, k, v), out, (first, count, column), factors).

Applies the formulas of `delta_net.delta_rule` to COLUMNS columns of a head, for `count` tokens
(at least 1) from row `first` on. The state [key_dim, COLUMNS] is updated by one token after
another. Each token's row of out [tokens, value_dim] receives the updated state's result for the
token's query.

q, k and v [tokens, dim] are not scaled. factors [count, 4] are the decay of the state, the scale
of the key, beta and the scale of the query. All arrays are float32 with contiguous rows. The
result of a token does not depend on how the token's chunk is split into calls.
"""
