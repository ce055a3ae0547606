"""The Jinja environment that chat templates run in; limits their time and size.

Time: every iteration of a loop and every call of a macro checks the clock. Size: the source, the
output, and the results of operators, filters and methods that multiply text (text/sandbox_sizes.py)
are limited. Nothing is evaluated while a template is compiled. A single call cannot be interrupted
and may cost the caller its process, so only worker processes render templates for clients.
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
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.text.sandbox_sizes import (
    FILTERS,
    BoundedPieces,
    Overrun,
    bounded_format,
    bounded_output,
    check_json,
    check_method,
    check_operator,
    joined,
)

MAX_SECONDS = 5.0
MAX_SOURCE = 256 << 10
"""Characters of a template's source; the longest known template has a tenth of that."""
_SCOPES = ("_loop_vars", "_block_vars")  # that Jinja adds to the arguments of every call


class _Generator(CodeGenerator):
    """Writes the code of a template without evaluating any of its expressions."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def buffer(self, frame: Frame) -> None:
        """Collect the body of a macro, a block or `{% set %}` in a list that checks its size."""
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.bounded_pieces()")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Set up as model publishers expect it: trimmed blocks, plain JSON, a few functions."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})
    code_generator_class = _Generator
    bounded_pieces = BoundedPieces

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            optimized=False,
            finalize=bounded_output,
        )
        del self.globals["lipsum"]  # writes any amount of filler in one call
        del self.filters["urlize"]  # can write a long text around each word
        self.filters |= FILTERS | {"tojson": _to_json}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._clock = threading.local()

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The whole output; Overrun beyond the limits, or whatever the template raises."""
        pieces = BoundedPieces()
        with self._deadline():
            pieces.extend(template.generate(variables))
        return "".join(pieces)

    def tick(self) -> str:
        """Called by the loops and macros of every template."""
        if time.thread_time() > getattr(self._clock, "deadline", float("inf")):
            raise Overrun(f"took more than {MAX_SECONDS:g} seconds")
        return ""

    def concat_bounded(self, *parts: Any) -> str:
        """The operator `~`."""
        return joined(parts)

    def call(self, context: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
        """Make a call for a template; raise Overrun if its result would be too large."""
        own = {name: value for name, value in named.items() if name not in _SCOPES}
        return super().call(context, obj, *check_method(obj, arguments, own), **named)

    def wrap_str_format(self, value: Any) -> Any:
        """`format` and `format_map` of a text, with bounded widths."""
        return bounded_format(value, super().wrap_str_format(value))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(
                f"it has {len(source):,} characters, and at most {MAX_SOURCE:,} are accepted", 1
            )
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

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier) -> nodes.Node:
        """`{% autoescape %}`: its option is evaluated by the compiler, so it must be a constant."""
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            raise jinja2.TemplateSyntaxError("autoescape takes true or false", node.lineno)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        self.generic_visit(node)
        return self.visit_EvalContextModifier(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _own_call("concat_bounded", node.nodes)


def _own_call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """A call that no variable of the template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    check_json(value, indent, separators)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(joined((message,)))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
