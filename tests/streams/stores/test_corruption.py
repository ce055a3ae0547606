"""Tests a short run of `make corrupt`."""

from pathlib import Path

from stress.attack.corruption import run


def test_forty_corruptions_harm_no_stream_but_their_own(tmp_path: Path) -> None:
    assert run(40, 0, tmp_path) == []
