"""Tests when a stream is blamed for the death of engines."""

from msgspec.structs import replace

from headrace.generation.crash_blame import CrashBlame
from headrace_common.ids import SequenceId
from tests.fleet.fakes import DOWN

MINE, OTHER = (SequenceId(1), SequenceId(2)), SequenceId(3)
ALONE = replace(DOWN, suspects=MINE)
KILLED_ALONE = replace(ALONE, from_outside=True)


def test_a_stream_outside_the_fatal_step_is_not_a_suspect() -> None:
    blame = CrashBlame()
    assert blame.judge(replace(DOWN, suspects=(OTHER,)), MINE) is None and not blame.is_suspect
    assert blame.judge(DOWN, MINE) is None and not blame.is_suspect


def test_a_suspect_that_is_alone_in_the_next_fatal_step_is_guilty() -> None:
    blame = CrashBlame()
    assert blame.judge(replace(DOWN, suspects=(MINE[0], OTHER)), MINE) is None and blame.is_suspect
    assert blame.judge(replace(DOWN, suspects=(*MINE, OTHER)), MINE) is None
    poison = blame.judge(ALONE, MINE)
    assert poison is not None and poison.code == "poison_request"


def test_a_stream_survives_three_external_kills_and_is_blamed_at_the_fourth() -> None:
    blame = CrashBlame()
    verdicts = [blame.judge(KILLED_ALONE, MINE) for _ in range(4)]
    assert [bool(poison) for poison in verdicts] == [False, False, False, True]


def test_a_token_clears_the_suspicion() -> None:
    blame = CrashBlame()
    blame.judge(ALONE, MINE)
    blame.clear()
    assert not blame.is_suspect and blame.judge(ALONE, MINE) is None
