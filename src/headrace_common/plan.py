"""One step as it crosses to the runner and back: what to compute, and what came of it.

Token ids are int32 in native byte order. Block tables are passed by reference: a chunk's
`block_ids` is the lease's own array, to be read while its plan is in flight.
"""

from array import array
from typing import NamedTuple

import msgspec

from headrace_common.ids import BlockId, SequenceId, SlotId
from headrace_common.sampling import Logprobs, Sampling

NO_SLOT = SlotId(-1)


class EncodeWork(msgspec.Struct, frozen=True):
    """An encoder's work that must precede some tokens of a prompt: reading a source, or an image.

    Tokens [start, end) need it. Its `num_units` parts (layers, as a rule) cost the same: b·size +
    a·size² seconds each, `size` in the encoder's own tokens. `is_whole`: it cannot be cut, and runs
    in a step of its own. `is_source`: it stands for the prompt in progress.
    """

    start: int
    end: int
    size: int
    num_units: int = 1
    is_whole: bool = False
    is_source: bool = False
    data: bytes = b""  # for the lane alone
    mark: bytes = b""  # what its tokens show, beside their ids: equal ones show the same


class PromptInputs(msgspec.Struct, frozen=True):
    """Inputs of a prompt beside its tokens; both in the order of the tokens.

    `spans` are runs of tokens [start, end) that attend both ways: no chunk ends within one.
    """

    works: tuple[EncodeWork, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


class SourceSpec(msgspec.Struct, frozen=True):
    """How a model takes prompts that are sources: answers are sequences that begin with these."""

    start_ids: tuple[int, ...]
    num_units: int  # of its encoder
    can_be_cut: bool


class Begin(msgspec.Struct, frozen=True):
    """A sequence that the runner hears of for the first time, or again after a preemption."""

    sequence_id: SequenceId
    token_ids: "array[int]"  # all known tokens: the prompt, then those sampled before
    num_prompt: int
    choice: int  # k of the random counter (i, k): the number of the choice within its prompt
    sampling: Sampling
    inputs: PromptInputs = PromptInputs()


class Chunk(msgspec.Struct, frozen=True):
    """A sequence's share of a step: tokens [start, start + length), contiguous over its chunks.

    `num_rows` rows of logits are asked for, those of the chunk's last tokens: 0, 1 or length.
    Each sequence in `draws` draws one token from the last row (siblings of one prompt draw from
    the same row); it becomes token number start + length of that sequence.

    The chunk's last tokens may be a `guess` of what follows the last known one. Its one sequence
    then draws from the row of that one, and from the next row for as long as it drew what was
    guessed.
    """

    sequence_id: SequenceId
    start: int
    length: int
    num_rows: int
    draws: tuple[SequenceId, ...]
    block_ids: "array[int]"
    slot_id: SlotId = NO_SLOT
    num_first: int = 0  # tokens of the first text where the prompt is a pair of texts
    guess: tuple[int, ...] = ()
    adapter: str = ""  # the fingerprint of what changes its rows

    @property
    def num_known(self) -> int:
        """Its tokens that are no guesses."""
        return self.length - len(self.guess)


class EncodeChunk(msgspec.Struct, frozen=True):
    """Units [start, end) of a sequence's work number `work`, each time from where it ended."""

    sequence_id: SequenceId
    work: int
    start: int
    end: int
    slot_id: SlotId = NO_SLOT


class LoadedRun(msgspec.Struct, frozen=True):
    """Numbers of `num_blocks` blocks that were read; the first `skip` are in memory already."""

    numbers: memoryview
    num_blocks: int
    skip: int
    block_ids: "array[int]"  # to put the others into


class Load(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a sequence are put into memory as they were computed earlier.

    With each run comes the state after it, if the lane keeps any in slots.
    """

    sequence_id: SequenceId
    start: int
    end: int
    runs: tuple[LoadedRun, ...]
    slot_id: SlotId = NO_SLOT


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy one block after the forward of the step (a sibling's partly filled last block)."""

    source: BlockId
    target: BlockId


class SlotCopy(msgspec.Struct, frozen=True):
    """Copy one slot: a sibling's recurrent state or cache, a snapshot saved or restored."""

    source: SlotId
    target: SlotId


class StepPlan(msgspec.Struct, frozen=True):
    """Everything the runner does in one step, in this order.

    Ended, begun, restores, loads, what is to be encoded (one chunk at most), chunks, then copies.

    `ended` names sequences whose tensors and last tokens may be forgotten before the step:
    finished, cancelled and preempted ones alike. One of them may begin again in the same step.
    `slot_copies` hold both the states of siblings and those saved as snapshots.
    """

    begun: tuple[Begin, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    ended: tuple[SequenceId, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    slot_copies: tuple[SlotCopy, ...] = ()
    restores: tuple[SlotCopy, ...] = ()  # snapshots put into slots before the chunks
    encoded: tuple[EncodeChunk, ...] = ()
    loads: tuple[Load, ...] = ()
    worked_on: tuple[SequenceId, ...] = ()  # sequences that it loads or computes; others only draw
    allowed_s: float = 0.0  # seconds that the watch on hangs allows it; 0 while unmeasured

    @property
    def named(self) -> list[SequenceId]:
        """The sequences that it loads, computes or draws for, each once."""
        ids = [load.sequence_id for load in self.loads]
        ids += [chunk.sequence_id for chunk in self.encoded]
        return ids + [i for chunk in self.chunks for i in chunk.draws or (chunk.sequence_id,)]


class Drawn(msgspec.Struct, frozen=True):
    """The draw of one sequence from its rows: tokens, or the reason why there are no more.

    `forced`: the tokens that its grammar lets follow, as far as it leaves no choice.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None  # a row per token
    error: str | None = None
    forced: tuple[int, ...] = ()


class ChunkResult(msgspec.Struct, frozen=True):
    """`drawn` is parallel to the chunk's `draws`.

    `prompt_logprobs` has one row per token of the prompt that follows one of this chunk's
    tokens, if the sequence asked for them. `vector` (packed float32) is there once a sequence that
    draws nothing has been computed, or the `error` why it cannot be given.
    """

    drawn: tuple[Drawn, ...] = ()
    prompt_logprobs: Logprobs | None = None
    vector: bytes = b""
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True):
    """`chunks` is parallel to the plan's; `seconds` is the runner's own time for the step."""

    chunks: tuple[ChunkResult, ...]
    seconds: float
    encode_seconds: float = 0.0  # the part of `seconds` that encoding took; 0: all was at hand
    load_seconds: float = 0.0  # and the part that loads took
    is_timed: bool = True  # False: the engine was stopped meanwhile, so no time says anything


class Elsewhere(NamedTuple):
    """The needs of the other engines on these cores."""

    decode_s: float = 0.0  # of each of their steps, for streams alone
    is_awaited: bool = False  # whether one of their streams waits for its turn
    num_with_prompts: int = 0  # that read prompts, too
