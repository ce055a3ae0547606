"""A chunk goes on from its own tokens, and the cells suffice, whatever the books do."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Chunk
from headrace_engine.memory.memory import Memory
from headrace_engine.runner.lanes.llama_cpp import LlamaCpp
from headrace_engine.runner.lanes.sequence_map import Ints, SequenceMap

SIZE, NUM_BLOCKS = 2, 10
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few tokens: many shared prefixes


class FakeCells:
    """Sequences of shared cells, as in llama.cpp's one pool; a cell is a list of its token."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells, self.num_computed_again = num_cells, 0
        self.sequences: dict[int, list[list[int]]] = {}

    def remove(self, sequence: int, start: int) -> None:
        del self.sequences.get(sequence, [])[start:]

    def copy(self, source: int, target: int, end: int) -> None:
        assert not self.sequences.get(target)
        assert len(self.sequences[source]) >= end
        self.sequences[target] = self.sequences[source][:end]

    def compute(self, sequence: int, token_ids: Ints) -> None:
        assert not self.sequences.get(sequence)
        self.num_computed_again += 1
        self.write(sequence, token_ids.tolist())

    def write(self, sequence: int, token_ids: list[int]) -> None:
        self.sequences.setdefault(sequence, []).extend([token] for token in token_ids)
        used = {id(cell) for cells in self.sequences.values() for cell in cells}
        assert len(used) <= self.num_cells

    def tokens(self, sequence: int) -> list[int]:
        return [token for [token] in self.sequences.get(sequence, [])]


class Running:
    """A sequence of the scheduler's."""

    def __init__(self, lease, token_ids, chain, start):
        self.lease, self.token_ids, self.chain, self.start = lease, token_ids, chain, start


class PlacingMachine(RuleBasedStateMachine):
    """Real books over few sequences, so that some must make way."""

    running = Bundle("running")
    num_sequences = 4

    def __init__(self):
        super().__init__()
        self.memory = Memory(MemoryLayout(SIZE, NUM_BLOCKS))
        self.cells = FakeCells(SIZE * NUM_BLOCKS)
        self.held = SequenceMap(self.cells, NUM_BLOCKS, SIZE, self.num_sequences)

    @rule(target=running, prompt=PROMPTS)
    def begin(self, prompt):
        token_ids, chain = array("i", prompt), self.memory.chain("")
        match = self.memory.match(token_ids, chain)
        if not self.memory.can_reserve(match, len(prompt), 1):
            return None
        lease, _ = self.memory.reserve(match, len(prompt))
        return Running(lease, token_ids, chain, match.num_tokens)

    @rule(one=running, other=running, number=st.integers(1, 9))
    def step(self, one, other, number):
        """Two chunks at most: all are placed before any is computed."""
        self.held.next_step()
        placed = {}
        for each in dict.fromkeys((one, other)):
            if each is None or each.lease not in self.memory._leases:
                continue
            ids = each.token_ids[each.start :][:number]
            if ids:
                sequence = self.held.assign(each.lease.block_ids, each.start, ids)
                assert self.cells.tokens(sequence) == each.token_ids[: each.start].tolist()
                placed[sequence] = each, ids
        for sequence, (each, ids) in placed.items():
            self.cells.write(sequence, ids.tolist())
            each.start += len(ids)
            self.memory.publish(each.lease, each.token_ids, each.chain, each.start)

    @rule(target=running, one=running)
    def fork(self, one):
        if one is None or one.lease not in self.memory._leases or not one.start:
            return None
        if one.start < len(one.token_ids) or not self.memory.can_fork(one.start, 1):
            return None
        lease, copy, _ = self.memory.fork(one.lease, one.start)
        if copy:
            self.held.copy(copy.source, copy.target)
        return Running(lease, one.token_ids[:], one.chain, one.start)

    @rule(one=running, token=st.integers(0, 1))
    def draw(self, one, token):
        if one is None or one.lease not in self.memory._leases:
            return
        if self.memory.lacks_block(one.lease, len(one.token_ids) + 1):
            if not self.memory.num_available:
                return
            self.memory.grow(one.lease)
        one.token_ids.append(token)

    @rule(one=consumes(running))
    def end(self, one):
        if one is not None and one.lease in self.memory._leases:
            self.memory.release(one.lease)

    @rule()
    def fail(self):
        self.held.clear()
        assert not any(self.cells.sequences.values())


TestPlacingMachine = PlacingMachine.TestCase
TestPlacingMachine.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


def held_after_one_prompt() -> tuple[FakeCells, SequenceMap]:
    cells = FakeCells(SIZE * NUM_BLOCKS)
    held = SequenceMap(cells, NUM_BLOCKS, SIZE, 3)
    held.next_step()
    cells.write(held.assign(array("i", [0, 1, 2]), 0, array("i", [5, 6, 7, 8, 9])), [5, 6, 7, 8, 9])
    return cells, held


def test_a_prefix_is_shared_and_outlives_the_sequence_that_computed_it() -> None:
    cells, held = held_after_one_prompt()
    held.next_step()
    sequence = held.assign(array("i", [0, 1, 7]), 4, array("i", [3]))
    assert cells.tokens(sequence) == [5, 6, 7, 8] and cells.num_computed_again == 0


def test_the_next_turn_goes_on_in_the_same_sequence() -> None:
    cells, held = held_after_one_prompt()
    held.next_step()
    first = held.assign(array("i", [0, 1, 2]), 5, array("i", [4]))
    assert cells.tokens(first) == [5, 6, 7, 8, 9] and len(cells.sequences) == 1


class FailingCells(FakeCells):
    """Has no room for a prefix that is computed again."""

    def compute(self, sequence: int, token_ids: Ints) -> None:
        raise MemoryError


def test_a_prefix_that_cannot_be_computed_again_leaves_no_sequence() -> None:
    """Such a sequence would count as holding the prefix, although its cells are empty."""
    cells = FailingCells(SIZE * NUM_BLOCKS)
    lane = LlamaCpp.__new__(LlamaCpp)
    lane._context, lane._sequence_map = cells, SequenceMap(cells, NUM_BLOCKS, SIZE, 3)
    chunk = Chunk(SequenceId(0), 2, 1, 1, (SequenceId(0),), array("i", [0, 1]))
    with pytest.raises(MemoryError):
        lane.forward([chunk], [array("i", [7])])
    assert not lane._sequence_map._sequences


def test_what_had_to_make_way_is_computed_again_from_its_tokens() -> None:
    cells, held = held_after_one_prompt()
    for number in range(3):
        held.next_step()
        cells.write(held.assign(array("i", [3 + number]), 0, array("i", [1])), [1])
    held.next_step()
    sequence = held.assign(array("i", [0, 1, 7]), 4, array("i", [3]))
    assert cells.tokens(sequence) == [5, 6, 7, 8] and cells.num_computed_again == 1
