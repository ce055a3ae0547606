"""Tests the files of prefix segments: only undamaged segments of the same model are read."""

import random
from pathlib import Path

import msgspec
import pytest

from headrace_common.prefix import PrefixSegment
from headrace_engine.prefixes import format
from headrace_engine.prefixes.folder import PrefixFolder
from tests.prefixes.builders import ABOUT, file_of, make_folder, make_segment, numbers_of

SIZE = 1000


def read(folder: PrefixFolder, run: PrefixSegment, size: int = SIZE) -> bytes:
    return bytes(folder.read(run, size))


def reason_of(folder: PrefixFolder, run: PrefixSegment, size: int = SIZE) -> str:
    with pytest.raises(format.Unusable) as caught:
        read(folder, run, size)
    return caught.value.reason


def test_a_segment_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder, run = make_folder(tmp_path), make_segment()
    folder.write(run, numbers_of(run))
    assert read(folder, run) == bytes(numbers_of(run))


@pytest.mark.parametrize(
    "changed",
    [{"origin": b"tlas"}, {"token_ids": make_segment(token=8).token_ids}],
    ids=["salt", "tokens"],
)
def test_a_segment_with_the_same_name_but_other_content_is_a_miss(
    tmp_path: Path, changed: dict[str, bytes]
) -> None:
    folder, run = make_folder(tmp_path), make_segment()
    folder.write(run, numbers_of(run))
    assert reason_of(folder, msgspec.structs.replace(run, **changed)) == "foreign"


def test_a_file_of_another_model_is_a_miss(tmp_path: Path) -> None:
    one, run = make_folder(tmp_path), make_segment()
    other = make_folder(tmp_path, msgspec.structs.replace(ABOUT, dtype="float32"))
    one.write(run, numbers_of(run))
    file_of(one, run).rename(other.path / file_of(one, run).name)
    assert reason_of(other, run) == "foreign"


@pytest.mark.parametrize("field", ["fingerprint", "lane", "dtype", "kernels", "cache", "libraries"])
def test_everything_that_changes_the_numbers_changes_the_folder(field: str) -> None:
    assert msgspec.structs.replace(ABOUT, **{field: "other"}).key != ABOUT.key
    assert msgspec.structs.replace(ABOUT, block_size=8).key != ABOUT.key
    assert msgspec.structs.replace(ABOUT, model="another name").key == ABOUT.key


def test_a_file_of_another_version_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = make_folder(tmp_path), make_segment()
    with monkeypatch.context() as patched:
        patched.setattr(format, "VERSION", 0)
        folder.write(run, numbers_of(run))
    assert reason_of(folder, run) == "older"


def test_a_truncated_file_of_any_length_is_damaged(tmp_path: Path) -> None:
    folder, run = make_folder(tmp_path), make_segment()
    folder.write(run, numbers_of(run))
    path = file_of(folder, run)
    whole = path.read_bytes()
    for size in (0, 3, 18, 60, len(whole) - SIZE, len(whole) - 5, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert reason_of(folder, run) == "damaged", size


def damage(whole: bytes, dice: random.Random) -> bytes:
    """Return a damaged copy: bits are flipped, or bytes are lost, repeated or zero."""
    data = bytearray(whole)
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.choice((1, 1, 4, 64, 512, len(data))))
    match dice.randrange(5):
        case 0:
            data[start] ^= 1 << dice.randrange(8)
        case 1:
            data[start:end] = dice.randbytes(end - start)
        case 2:
            data[start:end] = bytes(end - start)
        case 3:
            del data[start:end]
        case 4:
            data[start:start] = data[start:end]
    return bytes(data)


def damaged_files_are_misses(tmp_path: Path, number: int) -> None:
    folder, run = make_folder(tmp_path), make_segment()
    folder.write(run, numbers_of(run))
    path = file_of(folder, run)
    whole = path.read_bytes()
    for seed in range(number):
        path.write_bytes(damaged := damage(whole, random.Random(seed)))
        if damaged != whole:
            assert reason_of(folder, run) in ("damaged", "older", "foreign"), seed


def test_damaged_files_are_misses(tmp_path: Path) -> None:
    damaged_files_are_misses(tmp_path, 300)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_files_are_misses(tmp_path: Path) -> None:
    damaged_files_are_misses(tmp_path, 100_000)
