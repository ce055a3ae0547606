"""Tests the code style: sizes, names, empty package files and light imports."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "src" / "headrace_kernels"
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 600, 60

BESIDE = {
    "tests": ("stress", "benchmarks", "tools", "mini"),
    "stress": ("tools",),
    "benchmarks": ("tools",),
    "tools": (),
    "mini": (),
}
"""Folders of code beside the package, and the folders that each may import."""

WRITTEN_AND_READ = {
    *("Accepted", "Error", "Event", "Finish", "Heartbeat", "Progress", "Queued", "Tokens"),
}
"""Stream events that the server writes and the client reads; the two share no code."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_file_is_longer_than_the_limit() -> None:
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    assert not {name: number for name, number in lines.items() if number > MAX_FILE}


def test_no_function_needs_scrolling() -> None:
    long = [(p.name, f.name) for p in SOURCES for f in functions(p) if length(f) > MAX_FUNCTION]
    assert not long


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(str(path.relative_to(ROOT / "src")))
    of_both = {"headrace/client/events.py", "headrace/streams/events.py"}
    allowed = {name for name in WRITTEN_AND_READ if places.get(name) == of_both}
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() <= allowed, {name: twice[name] for name in twice.keys() - allowed}


def test_no_function_is_called_through_getattr() -> None:
    """Forbids such calls because import contracts and readers cannot follow them."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Call)
        if isinstance(node.func.func, ast.Name) and node.func.func.id == "getattr"
    ]
    assert not found


@pytest.mark.parametrize("package", ["headrace", "headrace_common", "headrace_engine"])
def test_only_the_module_of_a_class_writes_the_fields_of_its_objects(package: str) -> None:
    """Keeps all writes to a field in the module of its class, where a reader finds them.

    Exceptions are objects of libraries, plain data that the function itself creates, and models,
    since torch modules are assembled by assignment.
    """
    ours = {name for path in SOURCES if is_imported_by(package, path) for name in fields(path)}
    found = [
        f"{path.name}: {ast.unparse(target)}"
        for path in (ROOT / "src" / package).rglob("*.py")
        if not path.is_relative_to(ROOT / "src" / "headrace_engine" / "models")
        for target in foreign_writes(nodes(path), ours - fields(path))
    ]
    assert set(found) == OF_LIBRARIES.get(package, set())


OF_LIBRARIES = {
    "headrace": {"chat_live.py: child.type", "chat_live.py: task.total"},
    "headrace_common": {"load_bar.py: task.total"},
}
"""Writes to library objects whose field has the same name as a field of our classes."""


@pytest.mark.parametrize(
    "write",
    [
        "def build(fleet): fleet.on_unknown = reread",
        "def build(): generation = Generation(); generation.desired = models",
        "def spend(self): self._budget.kept, self.left = 0.0, 1",
        "def count(runs):\n for run in runs: run.done += 1",
    ],
)
def test_a_write_to_a_field_of_another_object_is_found(write: str) -> None:
    ours = {"on_unknown", "desired", "kept", "left", "done"}
    assert foreign_writes(list(ast.walk(ast.parse(write))), ours)


def is_imported_by(package: str, path: Path) -> bool:
    own = path.relative_to(ROOT / "src").parts[0]
    return own in (package, "headrace_common") and own != "headrace_kernels"


@cache
def fields(path: Path) -> set[str]:
    """Return the fields that a module's classes declare or assign in their methods."""
    found = set()
    for each in (node for node in nodes(path) if isinstance(node, ast.ClassDef)):
        found |= {t.id for n in each.body for t in assigned(n) if isinstance(t, ast.Name)}
        own = (t for node in ast.walk(each) for t in assigned(node) if is_own(t))
        found |= {t.attr for t in own if isinstance(t, ast.Attribute)}
    return found


def foreign_writes(tree: list[ast.AST], fields: set[str]) -> list[ast.Attribute]:
    """Return assignments to these fields of objects other than `self` and new plain data."""
    written = [
        target
        for node in tree
        for target in assigned(node)
        if isinstance(target, ast.Attribute) and not is_own(target) and target.attr in fields
    ]
    for function in tree if written else ():
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        made, inside = made_in(function), set(ast.walk(function))
        written = [t for t in written if not (t in inside and root_of(t) in made)]
    return written


def assigned(node: ast.AST) -> list[ast.expr]:
    """Return the targets of a statement, with tuples unpacked."""
    targets = list(node.targets) if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        targets = [node.target]
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    return [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]


def is_own(target: ast.expr) -> bool:
    base = target.value if isinstance(target, ast.Attribute) else None
    return isinstance(base, ast.Name) and base.id in ("self", "cls")


def root_of(target: ast.expr) -> str:
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def made_in(function: ast.AST) -> set[str]:
    """Return the variables that hold plain data or library objects created in the function."""
    found = set()
    for node in ast.walk(function):
        value = getattr(node, "value", None) if assigned(node) else None
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func).rpartition(".")[2]
            if name not in defined() or name in plain_data():
                found |= {target.id for target in assigned(node) if isinstance(target, ast.Name)}
    return found


@cache
def defined() -> set[str]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for path in SOURCES for node in nodes(path) if isinstance(node, kinds)}


@cache
def plain_data() -> set[str]:
    """Return the names of dataclasses and msgspec structs."""
    classes = [n for path in SOURCES for n in nodes(path) if isinstance(n, ast.ClassDef)]
    marks = ("msgspec.Struct", "dataclass")
    return {
        each.name
        for each in classes
        if any(ast.unparse(mark).startswith(marks) for mark in (*each.bases, *each.decorator_list))
    }


def test_package_files_are_empty() -> None:
    full = [p for p in SOURCES if p.name == "__init__.py" and p.stat().st_size]
    assert full == [ROOT / "src" / "headrace" / "__init__.py", KERNELS / "__init__.py"]


def test_modules_open_with_a_line_that_says_what_they_own() -> None:
    bare = [
        str(p.relative_to(ROOT))
        for p in SOURCES
        if p.stat().st_size and not ast.get_docstring(nodes(p)[0])
    ]
    assert not bare


@pytest.mark.parametrize("module", ["headrace.server", "headrace.cli.main"])
def test_importing_the_gateways_side_loads_no_tensors(module: str) -> None:
    heavy = "torch transformers numba ray"
    code = f"import {module}, sys; print([m for m in {heavy.split()} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_imports_no_server() -> None:
    code = "import headrace.cli.main, sys; print('uvicorn' in sys.modules, 'httpx' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False False"


@pytest.mark.parametrize("folder", [*BESIDE, "src"])
def test_code_beside_the_package_imports_only_from_allowed_folders(folder: str) -> None:
    barred = {*BESIDE} - {folder, *BESIDE.get(folder, ())}
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for node in nodes(path)
        for name in imported(node)
        if name.partition(".")[0] in barred
    ]
    assert not found


@pytest.mark.parametrize("folder", [*BESIDE])
def test_other_code_does_not_import_the_modules_of_the_kernels(folder: str) -> None:
    """Also forbids tests of kernels to import the server; contracts check this in src."""
    own, hidden = ROOT / "tests" / "kernels", {path.stem for path in KERNELS.glob("*.py")}

    def is_barred(path: Path, name: str) -> bool:
        package, _, rest = name.partition(".")
        if path.is_relative_to(own):
            return package == "headrace"
        return package == "headrace_kernels" and rest.partition(".")[0] in hidden

    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for node in nodes(path)
        for name in imported(node)
        if is_barred(path, name)
    ]
    assert not found


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_every_program_beside_the_package_can_be_imported() -> None:
    folders = ("benchmarks", "tools", "mini")
    paths = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    # screenshots drive a browser, from an environment of their own
    names = [f"{path.parent.name}.{path.stem}" for path in paths if path.stem != "screenshots"]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
