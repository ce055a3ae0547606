"""Splits stored tensors that models use as several tensors.

Such tensors are stacks of experts, or projections whose rows are grouped by head. Each part gets
the name that other files use for a separate tensor.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Rows = Sequence[int]
"""Row numbers. A range is used where possible, because a file may have 100,000 parts."""


class TensorPart(NamedTuple):
    """Some rows of a tensor, or of one matrix of a stack. Empty `rows` means all rows."""

    name: str
    rows: Rows
    expert: int | None = None
    # Whether the matrix is stored transposed.
    is_transposed: bool = False


_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)")
_GPT_OSS = re.compile(_STACK.pattern + "(_bias|_blocks)?")
# Limit on the experts in a layer. A larger stack is not split, so loading the model fails.
_MAX_EXPERTS = 4096
# Limit on the dimensions of a tensor that is split. The longest known dimension is about 50,000.
_MAX_SIZE = 1 << 18
_HEADS = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
"""The config fields for the number and size of heads, and the default of each field."""
_BY_HEADS = re.compile(r"(.*\.linear_attn)\.in_proj_(qkvz|ba)\.weight")


def parts(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Iterator[TensorPart]:
    """Yield the parts of a tensor. Yields nothing if the tensor is invalid or is not split."""
    if not shape or not all(0 < size <= _MAX_SIZE for size in shape):
        return
    is_gpt_oss = config.get("architectures") == ["GptOssForCausalLM"]
    if is_gpt_oss and (found := _GPT_OSS.fullmatch(name)) and shape[0] <= _MAX_EXPERTS:
        yield from _of_gpt_oss(found[1], found[2], found[3] or "", shape)
    elif (found := _STACK.fullmatch(name)) and len(shape) == 3 and shape[0] <= _MAX_EXPERTS:
        yield from _of_experts(found[1], found[2], shape)
    elif found := _BY_HEADS.fullmatch(name):
        yield from _of_heads(found[1], found[2], shape[0], config)


def _of_experts(path: str, kind: str, shape: tuple[int, ...]) -> Iterator[TensorPart]:
    num, rows, _ = shape
    cuts: dict[str, Rows] = {kind: ()}
    if kind == "gate_up_proj":
        cuts = {"gate_proj": range(rows // 2), "up_proj": range(rows // 2, rows)}
    for expert in range(num):
        for own, its_rows in cuts.items():
            yield TensorPart(f"{path}.{expert}.{own}.weight", its_rows, expert)


def _of_gpt_oss(path: str, kind: str, suffix: str, shape: tuple[int, ...]) -> Iterator[TensorPart]:
    """Yield the parts of a gpt-oss stack.

    Rows of gate and up alternate. Matrices without a suffix in their name are stored transposed.
    """
    if len(shape) != (2 if suffix == "_bias" else 3):
        return
    rows = shape[1] if suffix else shape[2]
    cuts: dict[str, Rows] = {kind: ()}
    if kind == "gate_up_proj":
        cuts = {"gate_proj": range(0, rows, 2), "up_proj": range(1, rows, 2)}
    own = "bias" if suffix == "_bias" else "weight"
    for expert in range(shape[0]):
        for name, its_rows in cuts.items():
            yield TensorPart(f"{path}.{expert}.{name}.{own}", its_rows, expert, not suffix)


def _of_heads(path: str, kind: str, size: int, config: Mapping[str, Any]) -> Iterator[TensorPart]:
    """Split a projection whose rows are grouped by key head.

    qkvz becomes qkv (query, key and value) and z (gates). ba becomes b (betas) and a (decays).
    """
    stated = [config.get(field, default) for field, default in _HEADS.items()]
    if not all(isinstance(number, int) and 0 < number <= _MAX_SIZE for number in stated):
        return
    rows = _head_rows(kind, size, *stated)
    if rows is None:
        # The tensor is not split, so loading the model fails with an error.
        return
    names = ("qkv", "z") if kind == "qkvz" else ("b", "a")
    for own, its_rows in zip(names, rows, strict=True):
        yield TensorPart(f"{path}.in_proj_{own}.weight", its_rows)


@functools.lru_cache(maxsize=4)
def _head_rows(
    kind: str, size: int, heads: int, key: int, value_heads: int, value: int
) -> tuple[Rows, Rows] | None:
    """Return the rows of both parts, or None if their number is not `size`.

    The result is cached, because all layers have the same rows.
    """
    share = value_heads // heads
    values = share * value
    sizes = (key, key, values, values) if kind == "qkvz" else (share, share)
    each = sum(sizes)
    if heads * each != size or size > _MAX_SIZE:
        return None

    def rows(number: int) -> tuple[int, ...]:
        first = sum(sizes[:number])
        begins = (head * each + first for head in range(heads))
        return tuple(row for begin in begins for row in range(begin, begin + sizes[number]))

    if kind == "qkvz":
        return rows(0) + rows(1) + rows(2), rows(3)
    return rows(0), rows(1)
