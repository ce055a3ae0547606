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
