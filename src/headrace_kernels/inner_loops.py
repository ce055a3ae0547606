"""Owns a look at the inner loops of the machine code, and at how often each uses its stack.

python -m headrace_kernels.inner_loops [KERNEL ...]; with NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES, those of another processor. A loop with no
such access has room in registers for all that it needs.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

from numba.core.ccallback import CFunc

from headrace_kernels import compiler, delta_net, groups, lean, paged_attention, product

KERNELS = {
    "bfloat16": product._bf16_by_bf16,
    "8 bits": product._bf16_by_int8,
    "4 bits in groups": groups._bf16_by_4,
    "8 bits in groups": groups._bf16_by_8,
    "attention": paged_attention._attend_bf16,
    "delta rule": delta_net._delta,
}
_PRODUCT = re.compile(r"\bv(?:fn?madd|pmaddw|pdp|dpbf)\w*\s.*%[yz]mm|\bfmla\b")
_LABEL, _JUMP = re.compile(r"(\.\w+):"), re.compile(r"\s+(?:j|b\.)\w+\s+(\.\w+)")
_STACK = re.compile(r"\(%r[sb]p|\[sp")
_LEAST = 4  # products of a loop that is worth a line


def assembly_of(kernel: Any) -> list[str]:
    lean.become_lean(kernel._function.__qualname__)
    compiled: Any = CFunc(kernel._function, compiler.SIGNATURE, locals={}, options={})
    compiled.compile()
    text: str = compiled._library.get_asm_str()
    return text.splitlines()


def inner_loops(lines: list[str]) -> Iterator[list[str]]:
    """Each stretch from a label to a jump back to it, if it has no other in it."""
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
