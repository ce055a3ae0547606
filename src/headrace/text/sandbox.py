"""The Jinja environment that chat templates run in; limits their time and size.

Time: every iteration of a loop and every call of a macro checks the clock. Size: the output and
the results of `+`, `*`, `**` and `~` are limited. A single built-in filter cannot be interrupted:
the caller may lose its worker to it, never the event loop.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SIZE = 32 << 20  # characters of output, or of one value
MAX_SECONDS = 5.0


class Overrun(Exception):
    """The template took too much; the message says what."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Set up as model publishers expect it: trimmed blocks, plain JSON, a few functions."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        del self.globals["lipsum"]  # writes any amount of filler in one call
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._clock = threading.local()

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The whole output; Overrun beyond the limits, or whatever the template raises."""
        pieces, size = [], 0
        with self._deadline():
            for piece in template.generate(variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        return "".join(pieces)

    def tick(self) -> str:
        """Called by the loops and macros of every template."""
        if time.thread_time() > getattr(self._clock, "deadline", float("inf")):
            raise Overrun(f"took more than {MAX_SECONDS:g} seconds")
        return ""

    def concat_bounded(self, *parts: Any) -> str:
        """The operator `~`."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_size(_repeated(left, right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right))
        if operator == "+":
            _check_size(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounds().visit(tree)
        return tree

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        self._clock.deadline = time.thread_time() + MAX_SECONDS
        try:
            yield
        finally:
            del self._clock.deadline


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training; its body is rendered as is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Calls `tick` in each body that can run often, and `concat_bounded` for each `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_own_call("tick", []), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _own_call("concat_bounded", node.nodes)


def _own_call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """A call that no variable of the template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _repeated(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    count = left if isinstance(left, int) else right
    return _length(left if count is right else right) * count if isinstance(count, int) else 0


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise Overrun(f"wrote more than {MAX_SIZE >> 20} Mi characters")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
