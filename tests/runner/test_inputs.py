from array import array

import torch

from headrace_common.ids import SequenceId
from headrace_common.plan import Chunk
from headrace_engine.runner.inputs import pack

CPU = torch.device("cpu")


def chunk(start: int, length: int, num_rows: int, blocks: list[int]) -> Chunk:
    return Chunk(SequenceId(0), start, length, num_rows, (), array("i", blocks))


def test_chunks_lie_behind_each_other_with_positions_and_addresses() -> None:
    chunks = [chunk(3, 3, 1, [7, 2, 9]), chunk(0, 1, 0, [5]), chunk(0, 2, 2, [1])]
    ids = [array("i", [40, 41, 42]), array("i", [50]), array("i", [60, 61])]
    batch = pack(chunks, ids, block_size=4, device=CPU)
    assert batch.token_ids.tolist() == [40, 41, 42, 50, 60, 61]
    assert batch.positions.tolist() == [3, 4, 5, 0, 0, 1]
    assert batch.write_index.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 20, 4, 5]
    assert batch.rows.tolist() == [2, 4, 5]
    assert batch.first_rows.tolist() == [0, 3, 4]
    assert batch.starts.tolist() == [3, 0, 0]
    assert batch.lengths.tolist() == [3, 1, 2]


def test_the_block_table_holds_the_blocks_in_use_padded_with_zero() -> None:
    batch = pack(
        [chunk(3, 2, 0, [7, 2, 9]), chunk(0, 1, 0, [5, 6])],
        [array("i", [1, 2]), array("i", [3])],
        block_size=4,
        device=CPU,
    )
    assert batch.block_table.tolist() == [[7, 2], [5, 0]]


def test_a_step_in_which_nobody_asks_for_rows_has_none() -> None:
    batch = pack([chunk(0, 1, 0, [0])], [array("i", [1])], block_size=4, device=CPU)
    assert batch.rows.tolist() == []
