"""Tests that a segment has the blocks of one prefix, whichever requests computed them."""

from array import array

import pytest

from headrace_common.ids import SlotId
from headrace_common.layout import MemoryLayout
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import Memory
from headrace_engine.memory.offers import Offers, SavedState
from headrace_engine.prefixes.assembly import MIN_TOKENS, Assembly
from tests.prefixes.builders import BLOCK


def test_prompts_share_segments_only_as_far_as_they_are_equal() -> None:
    offers = Offers()
    memory = Memory(MemoryLayout(BLOCK, num_blocks=8), offers)
    assembly = Assembly(DiskPrefixes(BLOCK, 2, 8), False, lambda run: None)
    head, tails = [1] * BLOCK, ([2] * BLOCK, [3] * BLOCK)
    prompts = [(array("i", head + tail), memory.chain("")) for tail in tails]
    leases = [memory.reserve(memory.match(*prompt), 2 * BLOCK)[0] for prompt in prompts]
    for num_computed in (BLOCK, 2 * BLOCK):  # the prompts take turns, one block each
        for lease, (token_ids, chain) in zip(leases, prompts, strict=True):
            memory.publish(lease, token_ids, chain, num_computed)
            for offer in offers.take():
                assembly.add(offer, 0.0)
    holders: dict[int, tuple[int, ...]] = {}
    for lease, (token_ids, _) in zip(leases, prompts, strict=True):
        for number, block_id in enumerate(lease.block_ids):
            holders[block_id] = tuple(token_ids[number * BLOCK : (number + 1) * BLOCK])
    kept = assembly.take(1.0)
    assert kept
    for one in kept:
        tokens = array("i", one.segment.token_ids)
        for number, block_id in enumerate(one.block_ids, one.segment.first):
            assert holders[block_id] == tuple(tokens[number * BLOCK : (number + 1) * BLOCK])


@pytest.mark.parametrize("has_states", [False, True])
def test_a_short_prefix_is_not_written_before_it_has_grown(has_states: bool) -> None:
    offers = Offers()
    memory = Memory(MemoryLayout(BLOCK, num_blocks=128), offers)
    assembly = Assembly(DiskPrefixes(BLOCK, 128, 8), has_states, lambda run: None)
    few, ids, chain = MIN_TOKENS - BLOCK, array("i", range(MIN_TOKENS)), memory.chain("")
    lease, _ = memory.reserve(memory.match(ids, chain), MIN_TOKENS)
    for num_tokens, expected in ((few, []), (MIN_TOKENS, [(0, MIN_TOKENS // BLOCK)])):
        memory.publish(lease, ids, chain, num_tokens)
        for offer in offers.take():
            assembly.add(offer, 0.0)
        end = num_tokens // BLOCK
        if has_states:
            assembly.add(SavedState(chain.name(ids, end - 1), end, SlotId(0), 0), 0.0)
        is_due = bool(expected) and not has_states
        assert assembly.is_growing == is_due
        assert [(one.segment.first, one.segment.end) for one in assembly.take(9.0)] == expected


class Forgotten(dict[bytes, int]):
    """A dictionary that another thread clears as soon as a segment is found."""

    def get(self, *asked):
        found = super().get(*asked)
        self.clear()
        return found


def test_a_segment_may_be_forgotten_while_it_is_found() -> None:
    offers = Offers()
    memory = Memory(MemoryLayout(BLOCK, num_blocks=8), offers)
    ids, chain = array("i", range(2 * BLOCK)), memory.chain("")
    disk = DiskPrefixes(BLOCK, 2, 8)
    disk.add(chain.name(ids, 1), 0, 2)
    disk._firsts = Forgotten(disk._firsts)
    touched: list[int] = []
    assembly = Assembly(disk, False, lambda segment: touched.append(segment.end))
    lease, _ = memory.reserve(memory.match(ids, chain), len(ids))
    memory.publish(lease, ids, chain, len(ids))
    for offer in offers.take():
        assembly.add(offer, 0.0)
    assert touched == [2]
