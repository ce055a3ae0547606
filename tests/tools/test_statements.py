import subprocess
import sys

import pytest

from tools import statements

SOURCE = b'''"""About the module."""

# one more than none
x = 1


def half():
    """Return it."""
    return x / 2
'''


def test_docstrings_and_comments_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("src/headrace_common/x.py", SOURCE), ("tools/x.py", b"pass\n")]
    monkeypatch.setattr(statements, "files", lambda revision: found)
    assert statements.count(None) == {"src/headrace_common": 3, "tools": 1, "all": 4}


@pytest.mark.parametrize("argument", ["--help", "no-such-revision"])
def test_an_argument_that_names_no_revision_is_answered_in_words(argument: str) -> None:
    command = [sys.executable, "-m", "tools.statements", argument]
    shown = subprocess.run(command, cwd=statements.ROOT, capture_output=True, text=True)
    assert shown.returncode == (0 if argument == "--help" else 128)
    assert "Traceback" not in shown.stderr
