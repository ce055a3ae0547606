"""Describes the work of the runner in one step, and the results of this work.

Token ids are int32 in native byte order. Block tables are passed by reference: a chunk's
`block_ids` is the same array as in the lease that reserves the sequence's memory. The runner may
read this array only while it executes the plan.
"""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headrace_common.ids import BlockId, SequenceId, SlotId
from headrace_common.sampling import Logprobs, Sampling

NO_SLOT = SlotId(-1)
# A guessed token that the draft model chooses during the step.
DRAFTED = -1

# The end of an encoder input that every token needs.
EVERY_TOKEN = 1 << 40

# The kinds of encoder units. LAYER is a whole layer. Otherwise, EMBED computes everything before
# the first layer; PROJECT the queries, keys and values of some rows of a layer; ATTEND the rest of
# the layer for some rows; and CROSS the keys and values that a decoder layer reads.
LAYER, EMBED, PROJECT, ATTEND, CROSS = range(5)
# The number of source tokens in a unit of PROJECT, ATTEND or CROSS.
UNIT_ROWS = 16


class EncoderStage(NamedTuple):
    """A part of an encoding that has to be complete before the next part begins.

    A stage consists of units. A unit is the smallest part of the work that a step can run: it
    computes `num_rows` tokens in one layer. Units of one kind share a cost model.
    """

    kind: int
    num_units: int
    num_rows: int


class EncoderPiece(NamedTuple):
    """Units [start, end) of an encoding. All of them belong to stage number `number`.

    The stage begins with unit `first`.
    """

    number: int
    stage: EncoderStage
    first: int
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        return (self.end - self.start) * self.stage.num_rows


class EncoderInput(msgspec.Struct, frozen=True):
    """A source text or an image to encode. Tokens [start, end) of the prompt need the result.

    The encoding consists of `num_units` units of work in `stages`; without stages, each unit is a
    layer. The encoder has `size` tokens. A unit of n tokens takes b·n + a·n·size seconds; the
    constants a and b depend on the kind of unit. If `is_whole`, the encoding cannot be split and
    runs in a separate step. If `is_source`, reported progress counts these `size` tokens instead
    of the prompt's tokens.
    """

    start: int
    end: int
    size: int
    num_units: int = 1
    is_whole: bool = False
    is_source: bool = False
    # Only the lane interprets these bytes.
    data: bytes = b""
    mark: bytes = b""  # hash of the content
    stages: tuple[EncoderStage, ...] = ()

    def pieces(self, start: int, end: int) -> Iterator[EncoderPiece]:
        """Divide units [start, end) by stage."""
        first = 0
        stages = self.stages or (EncoderStage(LAYER, self.num_units, self.size),)
        for number, stage in enumerate(stages):
            after = first + stage.num_units
            if max(start, first) < min(end, after):
                yield EncoderPiece(number, stage, first, max(start, first), min(end, after))
            first = after


class PromptInputs(msgspec.Struct, frozen=True):
    """Images and other inputs of a prompt besides its tokens, in the order of the prompt.

    `spans` are ranges of tokens [start, end) with bidirectional attention. No chunk may end
    inside a span.
    """

    works: tuple[EncoderInput, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


class SourceSpec(msgspec.Struct, frozen=True):
    """How an encoder-decoder processes prompts. Every answer starts with `start_ids`."""

    start_ids: tuple[int, ...]
    num_layers: int = 0  # 0 if the encoder cannot run layer by layer
    num_cross: int = 0  # the number of decoder layers; 0 if a layer cannot be cut

    @property
    def can_be_cut(self) -> bool:
        return self.num_layers > 0

    def encoding(self, size: int, data: bytes = b"") -> EncoderInput:
        """Describe the encoder's work for a source of `size` tokens.

        All of it must be done before the first token of the answer is processed.
        """
        stages = self._stages(size)
        return EncoderInput(
            start=0,
            end=EVERY_TOKEN,
            size=size,
            num_units=sum(stage.num_units for stage in stages),
            is_whole=not self.can_be_cut,
            is_source=True,
            data=data,
            stages=stages,
        )

    def _stages(self, size: int) -> tuple[EncoderStage, ...]:
        num_rows = min(UNIT_ROWS, size)
        num_units = -(-size // max(1, num_rows))
        embed = EncoderStage(EMBED, 1, size)
        if not self.can_be_cut:
            return (EncoderStage(LAYER, 1, size),)
        if not self.num_cross:
            layers = EncoderStage(LAYER, self.num_layers, size)
            return embed, layers, EncoderStage(CROSS, 1, size)
        project, attend, cross = (
            EncoderStage(kind, num_units, num_rows) for kind in (PROJECT, ATTEND, CROSS)
        )
        return embed, *self.num_layers * (project, attend), *self.num_cross * (cross,)


class Begin(msgspec.Struct, frozen=True):
    """A sequence that starts in the runner, or starts again after a preemption."""

    sequence_id: SequenceId
    token_ids: "array[int]"  # the prompt, then the sampled tokens
    num_prompt: int
    choice: int  # the k in the random generator's counter (i, k)
    sampling: Sampling
    inputs: PromptInputs = PromptInputs()
    state: bytes = b""  # the samplers' state after the last token


class Chunk(msgspec.Struct, frozen=True):
    """The part of a sequence that a step processes: tokens [start, start + length).

    The last `num_rows` tokens of the chunk need logits: 0, 1 or all of them. Each sequence in
    `draws` draws one token from the logits of the last token. Several choices of one prompt draw
    from the same logits. The drawn token becomes token number start + length of the drawing
    sequence.

    A chunk can end with a `guess`: guessed tokens after the last known token. With a guess, only
    one sequence draws. The first draw uses the logits of the last known token. As long as each
    drawn token equals the guessed token, another draw uses the next logits.

    The draft model processes the known tokens [draft_start, draft_end); the range is empty if the
    draft model has nothing to do. If the guess consists of DRAFTED, the range ends at the last
    known token, and the draft model then chooses the guess.
    """

    sequence_id: SequenceId
    start: int
    length: int
    num_rows: int
    draws: tuple[SequenceId, ...]
    block_ids: "array[int]"
    slot_id: SlotId = NO_SLOT
    num_first: int = 0  # tokens of a pair's first text
    guess: tuple[int, ...] = ()
    adapter: str = ""  # fingerprint of the chunk's adapter
    draft_start: int = 0
    draft_end: int = 0

    @property
    def is_drafted(self) -> bool:
        return self.guess[:1] == (DRAFTED,)

    @property
    def num_known(self) -> int:
        """The number of tokens that are not guessed."""
        return self.length - len(self.guess)


class EncodeChunk(msgspec.Struct, frozen=True):
    """Computes units [start, end) of one encoding. `work` is the encoding's index in the inputs.

    The chunks of one encoding follow each other without gaps.
    """

    sequence_id: SequenceId
    work: int
    start: int
    end: int
    slot_id: SlotId = NO_SLOT


class LoadedSegment(msgspec.Struct, frozen=True):
    """A segment of `num_blocks` blocks from disk. The first `skip` blocks are already in memory."""

    numbers: memoryview
    num_blocks: int
    skip: int
    # Targets in memory for the blocks that are not skipped.
    block_ids: "array[int]"


class Load(msgspec.Struct, frozen=True):
    """Copies the cached numbers of tokens [start, end) from disk into a sequence's memory.

    If the lane keeps states in slots, each segment also has the state after its last block.
    """

    sequence_id: SequenceId
    start: int
    end: int
    segments: tuple[LoadedSegment, ...]
    slot_id: SlotId = NO_SLOT


class BlockCopy(msgspec.Struct, frozen=True):
    """Copies a partly filled last block that choices of a prompt share.

    The copy runs after the step's forward pass.
    """

    source: BlockId
    target: BlockId


class SlotCopy(msgspec.Struct, frozen=True):
    """Copies a slot to another choice of the same prompt, or saves or restores a snapshot.

    The slot contains a recurrent state or a dense cache.
    """

    source: SlotId
    target: SlotId


class StepPlan(msgspec.Struct, frozen=True):
    """Everything that the runner does in one step.

    The runner processes `ended`, `begun`, `restores`, `loads`, `encoded`, `chunks`, and then the
    copies, in this order. All items of `encoded` belong to one encoding, each to a different stage.

    `ended` contains finished, cancelled and preempted sequences. The runner may free the tensors of
    these sequences before the step. A preempted sequence may begin again in the same step.
    `slot_copies` copies states to other choices of a prompt, and saves snapshots.
    """

    begun: tuple[Begin, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    ended: tuple[SequenceId, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    slot_copies: tuple[SlotCopy, ...] = ()
    restores: tuple[SlotCopy, ...] = ()  # snapshots to copy into slots before the chunks run
    encoded: tuple[EncodeChunk, ...] = ()
    loads: tuple[Load, ...] = ()
    # Sequences for which the step loads or processes something, not sequences that only draw.
    worked_on: tuple[SequenceId, ...] = ()
    allowed_s: float = 0.0  # seconds until the step counts as hanging; 0: no measurements yet

    @property
    def named(self) -> list[SequenceId]:
        """Return the sequences for which the step loads, encodes, processes or draws, each once."""
        ids = [load.sequence_id for load in self.loads]
        ids += dict.fromkeys(chunk.sequence_id for chunk in self.encoded)
        return ids + [i for chunk in self.chunks for i in chunk.draws or (chunk.sequence_id,)]


class Drawn(msgspec.Struct, frozen=True):
    """The tokens drawn for one sequence. `error` says why no more tokens can be drawn.

    `forced` are the tokens that must follow according to the sequence's grammar. `state` is the
    state of the samplers after the last token, in a private format of the samplers.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None  # one row per token
    error: str | None = None
    forced: tuple[int, ...] = ()
    state: bytes = b""


class ChunkResult(msgspec.Struct, frozen=True):
    """The result of a chunk; `drawn` is parallel to the chunk's `draws`.

    If the request asks for log probabilities of the prompt, `prompt_logprobs` has one row for each
    prompt token that follows a token of this chunk. `vector` (packed float32) is set for the last
    chunk of a sequence that draws nothing. If the vector cannot be computed, `error` says why.
    """

    drawn: tuple[Drawn, ...] = ()
    prompt_logprobs: Logprobs | None = None
    vector: bytes = b""
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step. `chunks` is parallel to the plan's chunks.

    `seconds` is the time in the runner.
    """

    chunks: tuple[ChunkResult, ...]
    seconds: float
    # The part of `seconds` for each item of `encoded`; 0 if the result was cached.
    encode_seconds: tuple[float, ...] = ()
    load_seconds: float = 0.0  # part of `seconds` for loads
    draft_seconds: float = 0.0  # part of `seconds` in the draft model
    # False if the process was stopped during the step, so that `seconds` includes the pause.
    is_timed: bool = True


class Elsewhere(NamedTuple):
    """The needs of the other engines that share this machine's cores."""

    # Sum of the seconds per step that the other engines need for their streams.
    decode_s: float = 0.0
    is_awaited: bool = False  # whether another engine has running streams
    num_with_prompts: int = 0  # number of other engines with prompts to process
