"""Tests the threads that store and read prefixes, and that no step waits for them."""

import logging
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_common.config.settings import PrefixCacheConfig
from headrace_common.layout import MemoryLayout
from headrace_common.prefix import DiskNews, PrefixSegment, ReadSegment, SegmentRead, SegmentsOnDisk
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import Lease, Memory
from headrace_engine.memory.offers import Offers
from headrace_engine.memory.prefix import NameChain
from headrace_engine.prefixes import keeper as keepers
from headrace_engine.prefixes.folder import PrefixFolder, StoredSegment
from headrace_engine.prefixes.keeper import DiskSite, PrefixKeeper
from tests.prefixes.builders import BLOCK, make_folder
from tools.harness.eventually import eventually

PER_RUN, BLOCK_BYTES = 2, 8


class FakeNumbers:
    """Blocks that contain their ids. `before` is called during each copy."""

    def __init__(self) -> None:
        self.before: Callable[[], object] = lambda: None

    def get(self, block_ids: "array[int]", slot_id: int | None) -> memoryview:
        self.before()
        return memoryview(b"".join(bytes([i]) * BLOCK_BYTES for i in block_ids))


class Kept:
    """A prefix keeper for a memory of sixteen blocks."""

    def __init__(self, root: Path, **limits: object) -> None:
        self.offers = Offers()
        self.memory = Memory(MemoryLayout(BLOCK, num_blocks=16), self.offers)
        self.folder, self.numbers = make_folder(root), FakeNumbers()
        self.disk = DiskPrefixes(BLOCK, PER_RUN, BLOCK_BYTES)
        self.disk.set_segments(self.folder.stored())
        site = DiskSite(self.folder, PrefixCacheConfig(**limits), self.disk, False)
        self.keeper = PrefixKeeper(site, self.numbers, self.memory)
        self.news: list[DiskNews] = []
        self.keeper.start(self.news.append)

    def compute(self, num_tokens: int, token: int = 5) -> tuple[Lease, "array[int]", NameChain]:
        """Compute a sequence of these tokens, and offer its blocks."""
        ids, chain = array("i", [token] * num_tokens), self.memory.chain("")
        lease, _ = self.memory.reserve(self.memory.match(ids, chain), num_tokens)
        self.memory.publish(lease, ids, chain, num_tokens)
        self.serve()
        return lease, ids, chain

    def serve(self) -> None:
        began = time.monotonic()
        self.keeper.serve(self.offers.take(), [])
        assert time.monotonic() - began < 0.5, "a step waited"

    def stored(self) -> set[tuple[int, int]]:
        return {(run.first, run.end) for run in self.folder.stored()}

    def read(self, run: PrefixSegment, number: int = 1) -> SegmentRead:
        self.keeper.serve([], [ReadSegment(number, run, run.num_blocks * BLOCK_BYTES)])
        eventually(lambda: bool(self.answers(number)))
        return self.answers(number)[0]

    def answers(self, number: int) -> list[SegmentRead]:
        return [n for n in self.news if isinstance(n, SegmentRead) and n.number == number]


def test_full_blocks_become_segments_and_come_back(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    lease, ids, chain = kept.compute(5 * BLOCK + 1)
    eventually(lambda: kept.stored() == {(0, 2), (2, 4), (4, 5)})
    answer = kept.read(kept.disk.segment(ids, chain, 2, 4))
    assert answer.numbers is not None
    assert bytes(answer.numbers) == b"".join(bytes([i]) * BLOCK_BYTES for i in lease.block_ids[2:4])
    told = [one for news in kept.news if isinstance(news, SegmentsOnDisk) for one in news.segments]
    assert {(first, end) for _, first, end in told} == {(0, 2), (2, 4), (4, 5)}
    kept.keeper.close()


def test_a_segment_on_disk_is_not_written_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.compute(4 * BLOCK)
    eventually(lambda: kept.stored() == {(0, 2), (2, 4)})
    kept.keeper.close()
    again, writes = Kept(tmp_path), []
    again.numbers.before = lambda: writes.append(1)
    again.compute(6 * BLOCK)
    eventually(lambda: again.stored() == {(0, 2), (2, 4), (4, 6)})
    assert len(writes) == 1
    again.keeper.close()


def test_a_sweep_forgets_segments_that_were_used_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Kept(tmp_path)
    first.compute(4 * BLOCK)
    eventually(lambda: first.stored() == {(0, 2), (2, 4)})
    first.keeper.close()
    again = Kept(tmp_path)
    again.compute(6 * BLOCK)
    eventually(lambda: len(again.keeper._writer._touched) == 2)
    monkeypatch.setattr(keepers, "_TOUCHED_EVERY_S", 0.0)
    monkeypatch.setattr(keepers, "_SWEPT_EVERY_S", 0.0)
    eventually(lambda: not again.keeper._writer._touched)
    again.keeper.close()


def test_blocks_reused_during_the_copy_are_not_stored(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    copied = threading.Event()

    def steal() -> None:
        kept.memory.release(leases.pop())
        kept.memory.reserve(kept.memory.match(array("i"), kept.memory.chain("")), 16 * BLOCK)
        kept.numbers.before = lambda: None
        copied.set()

    kept.numbers.before, leases = steal, [kept.compute(2 * BLOCK)[0]]
    assert copied.wait(5)
    kept.keeper.close()
    assert kept.stored() == set()


def test_the_last_segment_is_written_when_the_engine_stops(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.compute(3 * BLOCK)
    kept.keeper.close()
    assert kept.stored() == {(0, 2), (2, 3)}


def test_a_full_disk_is_logged_once_and_retried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, write, tries = Kept(tmp_path), PrefixFolder.write, []

    def full(self: PrefixFolder, run: PrefixSegment, numbers: memoryview) -> None:
        tries.append(run)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PrefixFolder, "write", full)
    with caplog.at_level(logging.WARNING):
        kept.compute(4 * BLOCK)
        eventually(lambda: len(tries) == 1)
        monkeypatch.setattr(kept.keeper._writer, "_paused_until", 0.0)
        kept.compute(6 * BLOCK, token=6)
        eventually(lambda: len(tries) == 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"Cached prefixes cannot be written to {tmp_path} ([Errno 28] No space left on device). "
        "Serving continues, and writing is tried again after 60 s. "
        "This warning is logged only once."
    ]
    monkeypatch.setattr(PrefixFolder, "write", write)
    monkeypatch.setattr(kept.keeper._writer, "_paused_until", 0.0)
    kept.compute(2 * BLOCK, token=7)
    eventually(lambda: kept.stored() == {(0, 2)})
    kept.keeper.close()


def test_a_hanging_disk_does_not_delay_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, kept = threading.Event(), Kept(tmp_path)
    monkeypatch.setattr(PrefixFolder, "write", lambda self, run, numbers: hangs.wait(30))
    monkeypatch.setattr(keepers, "_CLOSE_S", 0.1)
    for number in range(keepers.MAX_OFFERS + 50):
        lease, *_ = kept.compute(2 * BLOCK, token=number)
        kept.memory.release(lease)
    assert kept.keeper._writer._offers.qsize() <= keepers.MAX_OFFERS
    began = time.monotonic()
    kept.keeper.close()
    assert time.monotonic() - began < 2
    hangs.set()


def test_a_cleared_folder_is_filled_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "root")
    kept.compute(2 * BLOCK)
    eventually(lambda: kept.stored() == {(0, 2)})
    for path in kept.folder.path.iterdir():
        path.unlink()
    kept.folder.path.rmdir()
    kept.compute(2 * BLOCK, token=6)
    eventually(lambda: kept.folder.path.exists() and kept.stored() == {(0, 2)})
    kept.keeper.close()


@pytest.mark.parametrize("damage", ["damaged", "gone"])
def test_a_failed_read_has_a_reason_and_damage_is_logged(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path)
    _, ids, chain = kept.compute(4 * BLOCK)
    eventually(lambda: len(kept.stored()) == 2)
    for path in kept.folder.path.glob("*-*-*"):
        path.write_bytes(path.read_bytes()[:-1]) if damage == "damaged" else path.unlink()
    for number, first in enumerate((0, 2)):
        answer = kept.read(kept.disk.segment(ids, chain, first, first + 2), number)
        assert (answer.numbers, answer.miss) == (None, damage)
    assert len(caplog.records) == (damage == "damaged")
    assert kept.stored() == set(), "damaged files are removed"
    kept.keeper.close()


def test_segments_written_or_removed_by_other_engines_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "_LISTED_EVERY_S", 0.0)
    one, other = Kept(tmp_path), Kept(tmp_path)
    one.compute(2 * BLOCK)
    eventually(lambda: bool(one.folder.stored()))
    (run,) = one.folder.stored()

    def known() -> list[tuple[StoredSegment, ...]]:
        return [n.segments for n in other.news if isinstance(n, SegmentsOnDisk) and n.is_all]

    eventually(lambda: known()[-1:] == [(run,)])
    for path in one.folder.path.glob("*-*-*"):
        path.unlink()
    eventually(lambda: known()[-1:] == [()])
    one.keeper.close()
    other.keeper.close()


def test_a_lack_of_memory_only_causes_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    _, ids, chain = kept.compute(4 * BLOCK)
    eventually(lambda: kept.stored() == {(0, 2), (2, 4)})

    def short(*arguments: object) -> memoryview:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PrefixFolder, "read", short)
        assert kept.read(kept.disk.segment(ids, chain, 0, 2)).miss == "failed"
        patch.setattr(kept.numbers, "get", short)
        kept.compute(4 * BLOCK, token=9)
        kept.keeper.close()
    assert kept.stored() == {(0, 2), (2, 4)}
