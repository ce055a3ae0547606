"""Prints the inner loops of the kernels' machine code, and how often each loop accesses the stack.

python -m headrace_kernels.inner_loops [KERNEL ...]

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES select another processor. A loop without stack accesses keeps
all its values in registers.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

from numba.core.ccallback import CFunc

from headrace_kernels import compiler, delta_net, groups, lean, paged_attention, product

KERNELS = {
    "bfloat16": product.BF16_BY_BF16,
    "8 bits": product.BF16_BY_INT8,
    "4 bits in groups": groups.BF16_BY_4,
    "8 bits in groups": groups.BF16_BY_8,
    "attention": paged_attention._attend_bf16,
    "attention, int8 cache": paged_attention._attend_bf16_int8,
    "delta rule": delta_net._delta,
}
_PRODUCT = re.compile(r"\bv(?:fn?madd|pmadd|pdp|dpbf)\w*\s.*%[yz]mm|\bfmla\b")
_LABEL, _JUMP = re.compile(r"(\.\w+):"), re.compile(r"\s+(?:j|b\.)\w+\s+(\.\w+)")
_STACK = re.compile(r"\(%r[sb]p|\[sp")
# Loops with fewer products are not printed.
_LEAST = 4


def assembly_of(kernel: Any) -> list[str]:
    lean.become_lean(kernel._function.__qualname__)
    compiled: Any = CFunc(kernel._function, compiler.SIGNATURE, locals={}, options={})
    compiled.compile()
    text: str = compiled._library.get_asm_str()
    return text.splitlines()


def inner_loops(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines from each label to a jump back to the label, if no other loop is inside."""
    labels: dict[str, int] = {}
    loops = []
    for at, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = at
        elif (jump := _JUMP.match(line)) and jump[1] in labels:
            loops.append((labels[jump[1]], at))
    for first, last in loops:
        within = (a for a in loops if a != (first, last) and first <= a[0] and a[1] <= last)
        if next(within, None) is None:
            yield lines[first + 1 : last + 1]


def main() -> None:
    print(f"{'kernel':18} instructions  products  on the stack")
    for name in sys.argv[1:] or KERNELS:
        for loop in inner_loops(assembly_of(KERNELS[name])):
            products, stack = (sum(map(bool, map(p.search, loop))) for p in (_PRODUCT, _STACK))
            if products >= _LEAST:
                print(f"{name:18} {len(loop):12}  {products:8}  {stack:12}")


if __name__ == "__main__":
    main()
