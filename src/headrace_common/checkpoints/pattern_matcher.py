"""Matches names against regular expressions, as a program that can be killed.

A hostile expression can keep Python's `re` busy forever. Meanwhile `re` holds the interpreter's
lock.

The program reads {"patterns": [...], "names": [...]} from stdin. It writes a JSON array with one
number for each name: the index of the first pattern that matches the whole name, or -1. If an
expression is invalid, the program writes only the index of the invalid pattern. The program
imports only the standard library, to start fast.
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
