"""Matches names against regular expressions; run as a program, so that it can be killed.

A hostile expression can keep Python's `re` busy for ever while it holds the interpreter's lock.
Reads {"patterns": [...], "names": [...]} from standard input and writes a JSON array: for each name
the number of the first pattern that matches all of it, or -1. If a pattern is not a regular
expression, writes that pattern's number instead. Imports only the standard library, so that it
starts fast.
"""

import json
import re
import resource
import sys

_MAX_CPU_S = 2
_MAX_BYTES = 512 << 20


def first_matches(patterns: list[str], names: list[str]) -> list[int] | int:
    compiled = []
    for number, pattern in enumerate(patterns):
        try:
            compiled.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError):
            return number
    return [
        next((number for number, it in enumerate(compiled) if it.fullmatch(name)), -1)
        for name in names
    ]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    json.dump(first_matches(**json.load(sys.stdin.buffer)), sys.stdout)
