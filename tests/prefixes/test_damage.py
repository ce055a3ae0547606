"""Tests that each of a thousand damaged files is a miss, and that each kind is logged once."""

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace_common.config.settings import PrefixCacheConfig
from headrace_common.prefix import DiskNews, PrefixSegment, ReadSegment, SegmentRead
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.prefixes import format
from headrace_engine.prefixes.folder import file_name
from headrace_engine.prefixes.keeper import DiskSite, OneTimeWarnings, SegmentReader
from tests.prefixes.builders import ABOUT, BLOCK, make_folder, make_segment, numbers_of
from tools.harness.eventually import eventually

NUMBER, SIZE = 1000, 2000


def whole(run: PrefixSegment, key: bytes = ABOUT.key) -> bytes:
    return b"".join(format.parts(key, run, numbers_of(run, SIZE)))


def numbered(number: int) -> PrefixSegment:
    run = make_segment(token=number % 199)
    return msgspec.structs.replace(run, name=number.to_bytes(16, "big"))


def flipped(run: PrefixSegment, dice: random.Random) -> bytes:
    data = bytearray(whole(run))
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


def older(run: PrefixSegment, dice: random.Random) -> bytes:
    data, at = bytearray(whole(run)), len(format.MAGIC)
    data[at : at + 4] = (format.VERSION + dice.choice((-1, 1))).to_bytes(4, "little")
    return bytes(data)


ANY = {"damaged", "older", "foreign"}
WAYS: dict[str, tuple[Callable[[PrefixSegment, random.Random], bytes], set[str]]] = {
    "a bit flipped": (flipped, ANY),
    "cut": (lambda run, dice: whole(run)[: dice.randrange(len(whole(run)))], {"damaged"}),
    "longer": (lambda run, dice: whole(run) + dice.randbytes(9), {"damaged"}),
    "empty": (lambda run, dice: b"", {"damaged"}),
    "noise": (lambda run, dice: dice.randbytes(len(whole(run))), {"damaged"}),
    "another version": (older, {"older"}),
    "another model": (lambda run, dice: whole(run, key=bytes(16)), {"foreign"}),
    "another salt": (
        lambda run, dice: whole(msgspec.structs.replace(run, origin=b"tlas")),
        {"foreign"},
    ),
    "swapped": (lambda run, dice: whole(numbered(int.from_bytes(run.name) + 1)), {"foreign"}),
}


def test_a_thousand_damaged_files_are_misses_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, ways, expected = make_folder(tmp_path), list(WAYS), {}
    news: list[DiskNews] = []
    for number in range(NUMBER):
        run = numbered(number)
        make, expected[number] = WAYS[ways[number % len(ways)]]
        (folder.path / file_name(run)).write_bytes(make(run, random.Random(number)))
    sound = numbered(NUMBER)
    (folder.path / file_name(sound)).write_bytes(whole(sound))
    site = DiskSite(folder, PrefixCacheConfig(), DiskPrefixes(BLOCK, 2, SIZE // 2), False)
    reader = SegmentReader(site, OneTimeWarnings())
    with caplog.at_level(logging.DEBUG):
        reader.start(news.append)
        for number in range(NUMBER + 1):
            reader.requests.put(ReadSegment(number, numbered(number), SIZE))
        eventually(lambda: len(news) == NUMBER + 1)
        reader.requests.put(None)
    answers = [one for one in news if isinstance(one, SegmentRead)]
    for answer in answers[:-1]:
        assert answer.numbers is None and answer.miss in expected[answer.number], answer.number
    assert bytes(answers[-1].numbers or b"") == bytes(numbers_of(sound, SIZE)), "all else is read"
    reasons = Counter(answer.miss for answer in answers[:-1])
    told = [record for record in caplog.records if record.name.startswith("headrace")]
    assert len(told) == len(reasons) == 3
    left = {path.name for path in folder.path.glob("*-*-*")}
    foreign = {file_name(numbered(a.number)) for a in answers if a.miss == "foreign"}
    assert left == foreign | {file_name(sound)}, "what is damaged or older leaves"
