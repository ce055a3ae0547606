"""The tour's links and quotes are true."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
STOP = re.compile(
    r"^\[[^]]+\]\((\S+)\), `([\w.]+)`\n\n```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE
)
STOPS = STOP.findall((DOCS / "tour.md").read_text())


def code_of(path: Path, name: str) -> str:
    """A function's source without its docstring."""
    source = path.read_text()
    scope: ast.AST = ast.parse(source)
    for part in name.split("."):
        children = ast.iter_child_nodes(scope)
        scope = next(it for it in children if getattr(it, "name", "") == part)
    assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
    lines = source.splitlines()
    first, last = scope.lineno - 1, scope.end_lineno
    if ast.get_docstring(scope) is not None:
        words = scope.body[0]
        assert words.end_lineno is not None
        return textwrap.dedent(
            "\n".join(lines[first : words.lineno - 1] + lines[words.end_lineno : last])
        )
    return textwrap.dedent("\n".join(lines[first:last]))


def test_the_tour_has_fifteen_stops() -> None:
    assert len(STOPS) == 15


@pytest.mark.parametrize(("link", "name", "quote"), STOPS, ids=[name for _, name, _ in STOPS])
def test_a_stop_quotes_the_function_that_its_link_leads_to(
    link: str, name: str, quote: str
) -> None:
    code = code_of((DOCS / link).resolve(), name)
    shown, is_cut, _ = quote.partition("\n    # ...")
    assert code.startswith(shown + "\n") if is_cut else code == shown, "write the quote anew"


def test_the_table_of_the_source_tree_has_every_package() -> None:
    src = DOCS.parent / "src"
    found = {path.parent.name for path in src.rglob("*.py") if len(path.relative_to(src).parts) < 4}
    table = (DOCS / "architecture.md").read_text()
    missing = {name for name in found if f"`{name}`" not in table and f"{name}/" not in table}
    assert not missing
