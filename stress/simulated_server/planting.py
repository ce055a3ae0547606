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
        targets = dict.fromkeys(edit.target for edit in fault.edits)
        for target in targets:
            self._prepare(target, [edit for edit in fault.edits if edit.target == target])

    def apply(self) -> None:
        """Change the functions. Callers that already hold a function run the new code too."""
        for function, code in self._codes:
            function.__globals__[_COUNTER] = self.visits
            function.__code__ = code
        for owner, name, text in self._texts:
            setattr(owner, name, text)

    def _prepare(self, target: str, edits: Sequence[Edit]) -> None:
        owner, name, found = _resolve(target)
        if isinstance(found, str):
            for edit in edits:
                found = _changed_text(found, edit)
            self._texts.append((owner, name, found))
            return
        function = _function(found, target)
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
        for edit in edits:
            lines = _changed_lines(lines, edit)
        code = _compiled(function, "\n".join(lines), target)
        self._codes.append((function, code))


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


def _changed_lines(lines: list[str], edit: Edit) -> list[str]:
    """Replace the lines, and count each run of the place."""
    before = [line.strip() for line in textwrap.dedent(edit.before).strip().splitlines()]
    stripped = [line.strip() for line in lines]
    num = len(before)
    places = [at for at in range(len(lines) - num + 1) if stripped[at : at + num] == before]
    if len(places) != 1:
        raise Stale(f"{edit.target} has {len(places)} times: {edit.before.strip()}")
    (at,) = places
    margin = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    count = f"{_COUNTER}[{edit.target!r}] += 1"
    after = textwrap.dedent(edit.after).strip().splitlines()
    if edit.before.lstrip().startswith(_BRANCHES):
        after.insert(1, f"    {count}")
    else:
        after.insert(0, count)
    return [*lines[:at], *(margin + line for line in after), *lines[at + num :]]


def _compiled(function: FunctionType, source: str, target: str) -> CodeType:
    tree = ast.parse(source)
    head = tree.body[0]
    assert isinstance(head, ast.FunctionDef | ast.AsyncFunctionDef)
    head.decorator_list = []
    module = compile(tree, f"<planted {target}>", "exec")
    codes = [it for it in module.co_consts if isinstance(it, CodeType)]
    code = next(it for it in codes if it.co_name == function.__name__)
    if code.co_freevars != function.__code__.co_freevars:
        raise Stale(f"{target} uses variables of an enclosing function")
    return code
