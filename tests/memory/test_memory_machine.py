"""Tests that a memory stays consistent after any sequence of calls."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from headrace_common.layout import MemoryLayout
from headrace_engine.memory.memory import Memory

SIZE = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few tokens: many shared prefixes


class Held:
    """A lease, and how much its sequence has computed."""

    def __init__(self, lease, token_ids, chain):
        self.lease, self.token_ids, self.chain = lease, token_ids, chain
        self.num_computed = 0


class MemoryMachine(RuleBasedStateMachine):
    """Makes random calls, and remembers which tokens each block holds, like a runner."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.memory = Memory(MemoryLayout(SIZE, 10))
        self.content: dict[int, list[int]] = {}
        self.waiting = []

    @rule(target=leases, prompt=PROMPTS, salt=st.sampled_from(["", "other"]))
    def reserve(self, prompt, salt):
        token_ids, chain = array("i", prompt), self.memory.chain(salt)
        match = self.memory.match(token_ids, chain)
        assert match.num_tokens < len(prompt)
        for index, block_id in enumerate(match.block_ids):
            assert self.content[block_id] == prompt[index * SIZE : (index + 1) * SIZE]
        before = self.memory.num_available
        if not self.memory.can_reserve(match, len(prompt), 1):
            return None
        lease, _ = self.memory.reserve(match, len(prompt))
        assert self.memory.num_available >= 1 and self.memory.num_available <= before
        held = Held(lease, token_ids, chain)
        held.num_computed = match.num_tokens
        return held

    @rule(held=leases, number=st.integers(1, 9))
    def compute(self, held, number):
        if held is None or held.lease not in self.memory._leases:
            return
        end = min(held.num_computed + number, len(held.token_ids))
        for position in range(held.num_computed, end):
            block = self.content.setdefault(held.lease.block_ids[position // SIZE], [0] * SIZE)
            block[position % SIZE] = held.token_ids[position]
        held.num_computed = end
        self.memory.publish(held.lease, held.token_ids, held.chain, end)

    @rule(held=leases, token=st.integers(0, 1))
    def grow(self, held, token):
        if held is None or held.lease not in self.memory._leases:
            return
        is_full = self.memory.lacks_block(held.lease, len(held.token_ids) + 1)
        if is_full and not self.memory.num_available:
            return
        if is_full:
            self.memory.grow(held.lease)
        held.token_ids.append(token)

    @rule(held=consumes(leases))
    def release(self, held):
        if held is not None and held.lease in self.memory._leases:
            self.memory.release(held.lease)

    @rule(prompt=PROMPTS)
    def wait(self, prompt):
        self.waiting.append((array("i", prompt), self.memory.chain("")))

    @invariant()
    def who_waits_finds_what_a_newcomer_would(self):
        for token_ids, chain in self.waiting:
            newcomer = self.memory.chain("")
            assert self.memory.match(token_ids, chain) == self.memory.match(token_ids, newcomer)

    @invariant()
    def books_are_right(self):
        self.memory.check()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
