"""Provides the Jinja environment for chat templates, with limits on time and size.

Time: each loop iteration and each macro call checks the clock.

Size: there are limits for the source, for the output, and for the results of operators, filters
and methods that multiply text (see sandbox_sizes.py).

Nothing is evaluated while a template is compiled. A single call of a filter or method cannot be
interrupted, so the process may have to be killed. So only worker processes render templates for
clients.
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
"""The maximum number of characters of a template's source.

The longest templates of published models have a tenth of this length.
"""
# Jinja adds these names to the arguments of every call.
_SCOPES = ("_loop_vars", "_block_vars")


class _Generator(CodeGenerator):
    """Generates the code of a template without evaluating the template's expressions."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def buffer(self, frame: Frame) -> None:
        """Collect the output of a macro, a block or `{% set %}` in a list with a size limit."""
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.bounded_pieces()")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the options and helper functions that model publishers expect."""

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
        # `lipsum` writes any amount of filler text in one call.
        del self.globals["lipsum"]
        # `urlize` can write a long text around each word.
        del self.filters["urlize"]
        self.filters |= FILTERS | {"tojson": _to_json}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._clock = threading.local()

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template. Raises Overrun if a limit is exceeded; other errors are raised
        unchanged.
        """
        pieces = BoundedPieces()
        with self._deadline():
            pieces.extend(template.generate(variables))
        return "".join(pieces)

    def tick(self) -> str:
        """Raise Overrun if the deadline has passed; return "".

        All loops and macros of a template call this method.
        """
        if time.thread_time() > getattr(self._clock, "deadline", float("inf")):
            raise Overrun(f"took more than {MAX_SECONDS:g} seconds")
        return ""

    def concat_bounded(self, *parts: Any) -> str:
        """Join texts for the operator `~`."""
        return joined(parts)

    def call(self, context: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
        """Make a call for a template; raise Overrun if the result would be too large."""
        own = {name: value for name, value in named.items() if name not in _SCOPES}
        return super().call(context, obj, *check_method(obj, arguments, own), **named)

    def wrap_str_format(self, value: Any) -> Any:
        """Wrap `str.format` and `str.format_map` with a check of the widths."""
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
    """Supports `{% generation %}`, which marks assistant text for training; only renders the
    body.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Inserts a call of `tick` into each loop and macro, and replaces `~` by `concat_bounded`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_own_call("tick", []), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier) -> nodes.Node:
        """Refuse `{% autoescape %}` with a variable option, because the compiler would evaluate
        the option.
        """
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
    """Return a call of an environment's method; template variables cannot shadow this method."""
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
