"""Tensors that files hold as one and models take apart: stacks of experts, and projections whose
rows lie head by head. Each part is known by the name that it has where files hold it alone."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Rows = Sequence[int]
"""Row numbers, as a range where possible: a file may have 100,000 such tensors."""


class TensorPart(NamedTuple):
    """Rows of a tensor, or of one matrix of a stack; none: all of them."""

    name: str
    rows: Rows
    expert: int | None = None
    is_transposed: bool = False  # rows are columns of what is stored


_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)")
_GPT_OSS = re.compile(_STACK.pattern + "(_bias|_blocks)?")
_MAX_EXPERTS = 4096  # of a layer; a stack of more is not taken apart, so nobody knows it
_MAX_SIZE = 1 << 18  # of a tensor that is taken apart; the largest that is known has some 50,000
_HEADS = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
"""Fields of a config with their defaults."""
_BY_HEADS = re.compile(r"(.*\.linear_attn)\.in_proj_(qkvz|ba)\.weight")


def parts(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Iterator[TensorPart]:
    """The parts of a tensor; none if models take it as it is, or no model can take it."""
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
    """Rows of gate and up lie in turn. Without a suffix matrices lie transposed."""
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
    """Splits what lies by key head: query, key, values and gates; or betas and decays."""
    stated = [config.get(field, default) for field, default in _HEADS.items()]
    if not all(isinstance(number, int) and 0 < number <= _MAX_SIZE for number in stated):
        return
    rows = _head_rows(kind, size, *stated)
    if rows is None:
        return  # nobody knows it then, which an error says
    names = ("qkv", "z") if kind == "qkvz" else ("b", "a")
    for own, its_rows in zip(names, rows, strict=True):
        yield TensorPart(f"{path}.in_proj_{own}.weight", its_rows)


@functools.lru_cache(maxsize=4)
def _head_rows(
    kind: str, size: int, heads: int, key: int, value_heads: int, value: int
) -> tuple[Rows, Rows] | None:
    """Return the rows of both parts, once for all layers; None if they are not `size` rows."""
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
