"""Changes the server's functions in memory, so that a known fault shows what the simulation finds.

An edit names a function and a few of its lines. Nothing is changed on disk. If the lines no longer
occur in the function, the edit raises Stale: a fault that cannot be planted must not look like a
fault that was found.
"""

import ast
import importlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

_COUNTER = "__visits__"
_BRANCHES = ("except", "elif", "else:", "finally:")


class Stale(Exception):
    """Raised if the code that a fault changes does not exist any more."""


class Edit(NamedTuple):
    """Replaces lines of one function, or a part of a text such as a script for Redis.

    `target` is `module:Class.function` or `module:CONSTANT`. `before` must occur exactly once, and
    must start with a statement or a branch such as `except`. `after` replaces it.
    """

    target: str
    before: str
    after: str


class Fault(NamedTuple):
    """A fault that can be planted. `kind` is its class, and `effect` its effect on users."""

    kind: str
    effect: str
    edits: tuple[Edit, ...]


class Planted:
    """The edits of one fault, ready to be applied. Raises Stale if one of them does not fit."""

    def __init__(self, fault: Fault) -> None:
        # How often the changed lines ran.
        self.visits = Counter[str]()
        self._codes: list[tuple[FunctionType, CodeType]] = []
        self._texts: list[tuple[Any, str, str]] = []
        for target, edits in _by_target([fault]).items():
            owner, name, found = _resolve(target)
            if isinstance(found, str):
                for _, edit in edits:
                    found = _changed_text(found, edit)
                self._texts.append((owner, name, found))
                continue
            function = _function(found, target)
            lines = _lines(function)
            for _, edit in edits:
                lines = _changed_lines(lines, edit)
            self._codes.append((function, _compiled(function, lines, target)))

    def apply(self) -> None:
        """Change the functions. Callers that already hold a function run the new code too."""
        for function, code in self._codes:
            _install(function, code, self.visits)
        for owner, name, text in self._texts:
            setattr(owner, name, text)


class Probe:
    """Counts how often the lines run that each of these faults would change; changes nothing."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        # How often the lines of a fault ran, by the fault's place in `faults`.
        self.visits = Counter[int]()
        self._codes: list[tuple[FunctionType, CodeType]] = []
        for target, edits in _by_target(faults).items():
            _, _, found = _resolve(target)
            if not isinstance(found, str):
                function = _function(found, target)
                lines = _counted_lines(_lines(function), edits)
                self._codes.append((function, _compiled(function, lines, target)))

    def apply(self) -> None:
        for function, code in self._codes:
            _install(function, code, self.visits)


def _by_target(faults: Sequence[Fault]) -> dict[str, list[tuple[int, Edit]]]:
    by_target: dict[str, list[tuple[int, Edit]]] = {}
    for number, fault in enumerate(faults):
        for edit in fault.edits:
            by_target.setdefault(edit.target, []).append((number, edit))
    return by_target


def _install(function: FunctionType, code: CodeType, visits: Counter[Any]) -> None:
    function.__globals__[_COUNTER] = visits
    function.__code__ = code


def _resolve(target: str) -> tuple[Any, str, Any]:
    module, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for one in outer:
            owner = inspect.getattr_static(owner, one)
        return owner, name, inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise Stale(f"{target} does not exist: {error}") from None


def _function(found: Any, target: str) -> FunctionType:
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        raise Stale(f"{target} is not a function")
    return found


def _changed_text(text: str, edit: Edit) -> str:
    if text.count(edit.before) != 1:
        raise Stale(f"{edit.target} has {text.count(edit.before)} times: {edit.before}")
    return text.replace(edit.before, edit.after)


def _lines(function: FunctionType) -> list[str]:
    return textwrap.dedent(inspect.getsource(function)).splitlines()


def _place(lines: list[str], edit: Edit) -> tuple[int, int]:
    """Return the first of the lines that an edit replaces, and their number."""
    before = [line.strip() for line in textwrap.dedent(edit.before).strip().splitlines()]
    stripped = [line.strip() for line in lines]
    num = len(before)
    places = [at for at in range(len(lines) - num + 1) if stripped[at : at + num] == before]
    if len(places) != 1:
        raise Stale(f"{edit.target} has {len(places)} times: {edit.before.strip()}")
    return places[0], num


def _changed_lines(lines: list[str], edit: Edit) -> list[str]:
    """Replace the lines, and count each run of the place."""
    at, num = _place(lines, edit)
    margin = _margin(lines[at])
    after = [margin + line for line in textwrap.dedent(edit.after).strip().splitlines()]
    count = f"{_COUNTER}[{edit.target!r}] += 1"
    if _is_branch(edit):
        after.insert(1, f"{margin}    {count}")
    else:
        after.insert(0, margin + count)
    return [*lines[:at], *after, *lines[at + num :]]


def _counted_lines(lines: list[str], edits: Sequence[tuple[int, Edit]]) -> list[str]:
    """Count each run of each place without a change."""
    new: dict[int, list[str]] = {}
    for number, edit in edits:
        at, _ = _place(lines, edit)
        margin = _margin(lines[at]) + "    " * _is_branch(edit)
        before = at + _is_branch(edit)
        new.setdefault(before, []).append(f"{margin}{_COUNTER}[{number}] += 1")
    return [it for at, line in enumerate(lines) for it in (*new.get(at, ()), line)]


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _is_branch(edit: Edit) -> bool:
    return edit.before.lstrip().startswith(_BRANCHES)


def _compiled(function: FunctionType, lines: list[str], target: str) -> CodeType:
    tree = ast.parse("\n".join(lines))
    head = tree.body[0]
    assert isinstance(head, ast.FunctionDef | ast.AsyncFunctionDef)
    head.decorator_list = []
    module = compile(tree, f"<planted {target}>", "exec")
    codes = [it for it in module.co_consts if isinstance(it, CodeType)]
    code = next(it for it in codes if it.co_name == function.__name__)
    if code.co_freevars != function.__code__.co_freevars:
        raise Stale(f"{target} uses variables of an enclosing function")
    return code
