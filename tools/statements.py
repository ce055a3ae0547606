"""Counts the statements of the Python code. The count does not depend on the code's format.

    python tools/statements.py              # this tree, by package
    python tools/statements.py OLD          # a revision, and how many more this tree has
    python tools/statements.py OLD NEW      # a revision, and the difference to a second one

Docstrings and comments are not counted.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "stress", "tools", "benchmarks", "mini")


def files(revision: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each Python file of a revision; None means this tree."""
    if revision is None:
        for folder in FOLDERS:
            for path in sorted((ROOT / folder).rglob("*.py")):
                yield str(path.relative_to(ROOT)), path.read_bytes()
        return
    command = ["git", "-C", str(ROOT), "archive", "--end-of-options", revision]
    archive = subprocess.run(command, stdout=subprocess.PIPE)
    if archive.returncode:
        # git has already printed the reason.
        sys.exit(archive.returncode)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content and member.name.endswith(".py") and member.name.startswith(FOLDERS):
                yield member.name, content.read()


def count(revision: str | None) -> Counter[str]:
    """Count the statements by package, or by folder for files outside packages."""
    sums: Counter[str] = Counter()
    for name, content in files(revision):
        folder, *parts = name.split("/")
        package = "/".join([folder, *parts[:-1][:2]]) if folder == "src" else folder
        nodes = [node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.stmt)]
        sums[package] += sum(not is_docstring(node) for node in nodes)
    return sums + Counter(all=sums.total())


def is_docstring(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("old", nargs="?", help="a git revision")
    parser.add_argument("new", nargs="?", help="second revision; default: the working tree")
    given = parser.parse_args()
    old = count(given.old)
    new = count(given.new) if given.old else old
    for package in sorted(old.keys() | new.keys()):
        change = f"{new[package] - old[package]:+8,}" if given.old else ""
        print(f"{package:28}{old[package]:8,}{change}")


if __name__ == "__main__":
    main()
