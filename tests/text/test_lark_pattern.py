"""Tests that a Lark grammar without recursion and its pattern match the same texts."""

import re

import pytest

from headrace.text.lark_pattern import lark_pattern
from headrace_common.grammar import lark_fault, pattern_fault

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""A grammar for patches like those that coding agents send."""


def is_taken(grammar: str, text: str) -> bool:
    pattern = lark_pattern(grammar)
    assert pattern and not pattern_fault(pattern) and not lark_fault(grammar)
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        ("*** Add File: a.py\n+x = 1\n+\n", True),
        ("*** Update File: a.py\n*** Move to: b.py\n@@ def f\n-x\n+y\n z\n", True),
        ("*** Delete File: a.py\n*** Update File: b\n@@\n+y\n*** End of File\n", True),
        ("*** Add File: a.py\nx = 1\n", False),
        ("*** Add File: \n+x\n", False),
        ("", False),
    ],
)
def test_a_grammar_for_patches_becomes_a_pattern(body: str, is_right: bool) -> None:
    assert is_taken(PATCH, f"*** Begin Patch\n{body}*** End Patch") == is_right


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: A? b\nA: /[a-z]/\nb: "1"', ["x1", "1"], ["x", "xx1"]),
        (
            '?start: a\n     | ["-"] B // or\na: "(" ")"\nB: /[^\\/(]/+',
            ["()", "-xy", "x"],
            ["(", "-/", ""],
        ),
        (
            'start: "a\\n\\"" DIGIT* WS_INLINE\n%import common.DIGIT\n%import common.WS_INLINE',
            ['a\n"12 ', 'a\n"\t'],
            ['a\n"', "a1 "],
        ),
    ],
)
def test_lark_rules_without_recursion_become_a_pattern(
    grammar: str, right: list[str], wrong: list[str]
) -> None:
    assert all(is_taken(grammar, text) for text in right)
    assert not any(is_taken(grammar, text) for text in wrong)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start? ")"',
        "start: a\na: b\nb: a | /x/",
        "start: A A\nA: /x/\n%ignore /[ ]+/",
        'start: "yes"i',
        "start: /yes/i",
        'start: "a".."z"',
        "start: /x/~3",
        "start: A\n%import common.FLOAT",
        "start: nothing",
        "start: a )\na: /x/",
        "start: ( /x/",
        "a: /x/",
        "start: " + "(" * 9000 + "/x/" + ")" * 9000,
        "start: a40\na0: /x/\n" + "\n".join(f"a{i + 1}: a{i} a{i}" for i in range(40)),
        "start: " + "|" * 70_000,
    ],
)
def test_a_recursive_or_unknown_rule_has_no_pattern(grammar: str) -> None:
    assert lark_pattern(grammar) == ""
