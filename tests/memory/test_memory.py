"""Tests leases on blocks, slots and snapshots. Each test ends with a check of the whole memory."""

from array import array

import pytest

from headrace_common.layout import MemoryLayout
from headrace_common.plan import BlockCopy, SlotCopy
from headrace_engine.memory.blocks import BlockPool
from headrace_engine.memory.memory import NO_MATCH, Memory
from headrace_engine.memory.prefix import NameChain, PrefixIndex

SIZE = 4


@pytest.fixture
def memory():
    """Yield a memory of eight blocks with four positions each."""
    made = Memory(MemoryLayout(SIZE, 8))
    yield made
    made.check()


@pytest.fixture
def hybrid():
    """Yield such a memory with two slots, two snapshot slots, and snapshots every 8 positions."""
    made = Memory(MemoryLayout(SIZE, 8, 2, 2, snapshot_every=8))
    yield made
    made.check()


def tokens(number: int, first: int = 0) -> "array[int]":
    return array("i", range(first, first + number))


def leave(memory: Memory, token_ids: "array[int]", salt: str = "") -> list[int]:
    """Compute and release a sequence. Return its blocks."""
    lease, _ = memory.reserve(NO_MATCH, len(token_ids))
    memory.publish(lease, token_ids, memory.chain(salt), len(token_ids))
    memory.release(lease)
    return list(lease.block_ids)


def test_a_lease_holds_only_the_blocks_for_its_positions(memory):
    lease, restore = memory.reserve(NO_MATCH, 9)
    assert (len(lease.block_ids), memory.num_available, restore) == (3, 5, None)
    memory.release(lease)
    assert memory.num_available == 8 and not memory._leases


def test_a_reservation_leaves_the_spare_blocks(memory):
    assert memory.can_reserve(NO_MATCH, 24, 2)
    assert not memory.can_reserve(NO_MATCH, 25, 2)


def test_a_lease_grows_by_one_block_when_its_last_is_full(memory):
    lease, _ = memory.reserve(NO_MATCH, 8)
    assert not memory.lacks_block(lease, 8) and memory.lacks_block(lease, 9)
    memory.grow(lease)
    assert len(lease.block_ids) == 3


def test_a_prefix_is_found_by_later_sequences(memory):
    blocks = leave(memory, tokens(10))
    match = memory.match(tokens(12), memory.chain(""))
    assert list(match.block_ids) == blocks[:2] and match.num_tokens == 8
    lease, _ = memory.reserve(match, 12)
    assert list(lease.block_ids[:2]) == blocks[:2]


def test_a_repeated_match_continues_after_the_known_prefix(memory, monkeypatch):
    asked = []
    find = PrefixIndex.find
    monkeypatch.setattr(
        PrefixIndex, "find", lambda self, *block: asked.append(block) or find(self, *block)
    )
    leave(memory, tokens(12))
    chain = memory.chain("")
    first = memory.match(tokens(24), chain)
    assert first.num_tokens == 12 and len(asked) == 4
    assert memory.match(tokens(24), chain) == first and len(asked) == 5
    leave(memory, tokens(20))  # its last two blocks are new to the index
    assert memory.match(tokens(24), chain).num_tokens == 20 and len(asked) == 7


def test_an_evicted_block_is_not_found(memory):
    leave(memory, tokens(16))
    chain = memory.chain("")
    assert memory.match(tokens(17), chain).num_tokens == 16
    lease, _ = memory.reserve(NO_MATCH, 24)  # takes four free blocks and two of those
    assert memory.match(tokens(17), chain).num_tokens == 8
    memory.release(lease)


def test_unheld_blocks_are_not_counted_if_memory_is_too_small_anyway(memory, monkeypatch):
    leave(memory, tokens(8))
    match = memory.match(tokens(64), memory.chain(""))
    monkeypatch.setattr(BlockPool, "num_unheld", lambda *_: pytest.fail("counted"))
    assert not memory.can_reserve(match, 64, 0)


def test_a_match_leaves_one_token_to_compute(memory):
    leave(memory, tokens(8))
    matched = [memory.match(tokens(n), memory.chain("")).num_tokens for n in (1, 4, 5, 8, 9)]
    assert matched == [0, 0, 4, 4, 8]


def test_matched_unheld_blocks_do_not_count_as_available(memory):
    leave(memory, tokens(16))
    lease, _ = memory.reserve(NO_MATCH, 12)
    match = memory.match(tokens(24), memory.chain(""))
    assert memory.num_available == 5 and match.num_tokens == 16
    assert not memory.can_reserve(match, 24, 0)
    assert memory.can_reserve(match, 20, 0)
    memory.release(lease)


def test_a_shared_block_is_held_until_both_leases_are_released(memory):
    leave(memory, tokens(4))
    leases = [memory.reserve(memory.match(tokens(5), memory.chain("")), 5)[0] for _ in range(2)]
    shared = leases[0].block_ids[0]
    memory.release(leases[0])
    assert leases[1].block_ids[0] == shared
    assert memory.num_available == 6
    memory.release(leases[1])


def test_prompts_with_different_salts_share_no_prefix(memory):
    leave(memory, tokens(8), salt="one")
    assert memory.match(tokens(8), memory.chain("two")) == NO_MATCH
    assert memory.match(tokens(8), memory.chain("one")).num_tokens == 4


def test_equal_blocks_after_different_prefixes_do_not_match(memory):
    leave(memory, tokens(4) + tokens(4, 50))
    found = memory.match(tokens(4, 9) + tokens(4, 50) + tokens(1), memory.chain(""))
    assert found.num_tokens == 0


def test_a_match_compares_tokens_and_not_only_hashes():
    index, chain = PrefixIndex(), NameChain(SIZE, "")
    name = chain.name(tokens(4), 0)
    index.publish(3, name, tokens(4).tobytes())
    assert index.find(name, tokens(4).tobytes()) == 3
    assert index.find(name, tokens(4, 1).tobytes()) is None


def test_the_least_recently_used_block_is_evicted_last_blocks_first(memory):
    old, young = leave(memory, tokens(16)), leave(memory, tokens(16, 100))
    taken, _ = memory.reserve(NO_MATCH, 20)
    assert list(taken.block_ids) == [*reversed(old), young[-1]]
    assert memory.match(tokens(16, 100), memory.chain("")).num_tokens == 12


def test_a_match_makes_a_prefix_recently_used(memory):
    first = leave(memory, tokens(16))
    leave(memory, tokens(16, 100))
    match = memory.match(tokens(17), memory.chain(""))
    lease, _ = memory.reserve(match, 16)
    memory.release(lease)
    memory.reserve(NO_MATCH, 16)
    assert list(memory.match(tokens(17), memory.chain("")).block_ids) == first


def test_a_second_block_with_the_same_tokens_is_not_published(memory):
    leases = [memory.reserve(NO_MATCH, 8)[0] for _ in range(2)]
    for lease in leases:
        memory.publish(lease, tokens(8), memory.chain(""), 8)
    found = memory.match(tokens(9), memory.chain(""))
    assert found.block_ids == leases[0].block_ids
    memory.release(leases[1])
    memory.release(leases[0])
    assert memory.num_available == 8


def test_only_full_blocks_are_published(memory):
    lease, _ = memory.reserve(NO_MATCH, 7)
    memory.publish(lease, tokens(7), memory.chain(""), 7)
    assert memory.match(tokens(9), memory.chain("")).num_tokens == 4


def test_a_fork_shares_full_blocks_and_copies_the_rest(memory):
    lease, _ = memory.reserve(NO_MATCH, 10)
    assert memory.can_fork(10, 4) and not memory.can_fork(10, 5)
    fork, block_copy, slot_copy = memory.fork(lease, 10)
    assert fork.block_ids[:2] == lease.block_ids[:2]
    assert block_copy == BlockCopy(lease.block_ids[2], fork.block_ids[2])
    assert slot_copy is None
    memory.release(lease)
    memory.check()


def test_a_fork_of_full_blocks_copies_nothing(memory):
    lease, _ = memory.reserve(NO_MATCH, 8)
    assert memory.fork(lease, 8)[1:] == (None, None)


def test_a_lane_without_blocks_has_only_slots_and_no_prefix_cache():
    memory = Memory(MemoryLayout(num_slots=2))
    first, _ = memory.reserve(NO_MATCH, 5000)
    memory.publish(first, tokens(50), memory.chain(""), 50)
    assert memory.match(tokens(50), memory.chain("")) == NO_MATCH
    fork, block_copy, slot_copy = memory.fork(first, 50)
    assert block_copy is None and slot_copy == SlotCopy(first.slot_id, fork.slot_id)
    assert not memory.has_slot and not memory.can_reserve(NO_MATCH, 1, 0)
    assert not memory.lacks_block(first, 5001)
    memory.check()


def run_with_snapshots(memory: Memory, token_ids: "array[int]") -> list[int]:
    """Compute a prompt in chunks that end at snapshots. Return their positions."""
    chain, (lease, _), at, ends = memory.chain(""), memory.reserve(NO_MATCH, len(token_ids)), 0, []
    while at < len(token_ids):
        at = min(memory.snapshot_stop(at, len(token_ids)), len(token_ids))
        copy = memory.save(lease, at, len(token_ids))
        memory.publish(lease, token_ids, chain, at)
        if copy is not None:
            ends.append(at)
            memory.saved(copy.target, token_ids, chain, at, len(token_ids))
    memory.release(lease)
    return ends


def test_chunks_end_at_snapshots(hybrid):
    assert run_with_snapshots(hybrid, tokens(15)) == [8, 12]


def test_a_prefix_matches_only_up_to_a_snapshot(hybrid):
    run_with_snapshots(hybrid, tokens(15))
    assert hybrid.match(tokens(15), hybrid.chain("")).num_tokens == 12
    assert hybrid.match(tokens(12), hybrid.chain("")).num_tokens == 8
    assert hybrid.match(tokens(8), hybrid.chain("")) == NO_MATCH


def test_a_match_on_a_snapshot_restores_it(hybrid):
    run_with_snapshots(hybrid, tokens(15))
    lease, restore = hybrid.reserve(hybrid.match(tokens(15), hybrid.chain("")), 15)
    assert restore.target == lease.slot_id and restore.source in (2, 3)


def test_the_least_recently_used_snapshot_is_evicted(hybrid):
    run_with_snapshots(hybrid, tokens(9))  # one state, at 8
    run_with_snapshots(hybrid, tokens(9, 100))
    hybrid.release(hybrid.reserve(hybrid.match(tokens(9), hybrid.chain("")), 9)[0])
    run_with_snapshots(hybrid, tokens(9, 200))
    assert hybrid.match(tokens(9), hybrid.chain("")).num_tokens == 8
    assert hybrid.match(tokens(9, 100), hybrid.chain("")) == NO_MATCH


def test_snapshots_within_a_long_prompt_do_not_evict_those_at_ends():
    memory = Memory(MemoryLayout(SIZE, 200, 2, 8, snapshot_every=8))
    for first in (100, 200, 300):
        run_with_snapshots(memory, tokens(15, first))  # a snapshot at 8 and one at the end
    assert run_with_snapshots(memory, tokens(63, 400)) == [*range(8, 57, 8), 60]
    ends = [
        memory.match(tokens(15, first), memory.chain("")).num_tokens for first in (100, 200, 300)
    ]
    assert ends == [12, 12, 12]
    assert memory.match(tokens(63, 400), memory.chain("")).num_tokens == 60
    assert memory.match(tokens(59, 400), memory.chain("")).num_tokens == 56
    memory.check()


def test_a_snapshot_within_a_prompt_that_was_used_is_kept_like_one_at_an_end():
    memory = Memory(MemoryLayout(SIZE, 200, 2, 8, snapshot_every=8))
    run_with_snapshots(memory, tokens(15, 100))
    shared = memory.match(tokens(12, 100), memory.chain(""))
    assert shared.num_tokens == 8
    memory.release(memory.reserve(shared, 12)[0])
    run_with_snapshots(memory, tokens(63, 400))
    assert memory.match(tokens(12, 100), memory.chain("")).num_tokens == 8
    memory.check()


def test_a_snapshot_is_skipped_if_no_slot_is_free(hybrid):
    lease, _ = hybrid.reserve(NO_MATCH, 32)
    saves = [hybrid.save(lease, end, 40) for end in (8, 16, 24)]
    assert [save is None for save in saves] == [False, False, True]
    hybrid.not_saved(saves[0].target)
    hybrid.saved(saves[1].target, tokens(15), hybrid.chain(""), 16, 40)  # a token is not known
    assert hybrid.save(lease, 8, 40) is not None
    assert hybrid.save(lease, 9, 40) is None


def test_a_second_snapshot_of_the_same_state_is_discarded(hybrid):
    run_with_snapshots(hybrid, tokens(9))
    run_with_snapshots(hybrid, tokens(9))
    leases = [hybrid.reserve(NO_MATCH, 4)[0] for _ in range(2)]
    assert hybrid.save(leases[0], 8, 40).target != hybrid.save(leases[1], 8, 40).target


def test_without_snapshots_a_recurrent_lane_has_no_prefix_cache():
    memory = Memory(MemoryLayout(SIZE, 8, 2))
    leave(memory, tokens(8))
    assert memory.match(tokens(9), memory.chain("")) == NO_MATCH
    assert memory.snapshot_stop(0, 9) is None
    lease, _ = memory.reserve(NO_MATCH, 9)
    assert memory.save(lease, 8, 9) is None
    memory.check()
