"""Defines the messages between gateway and engine, as a tagged union for sockets and threads."""

import enum
from typing import Literal

import msgspec

from headrace_common.adapter import Adapter
from headrace_common.cache import KvCacheDtype
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import PromptInputs, SourceSpec
from headrace_common.sampling import Logprobs, PoolingMode, Sampling

Quantize = Literal["none", "int8", "int4", "own"]
"""The format of linear weights: unchanged, 8 bits, 4 bits, or the GGUF file's own format."""
InstructionSet = Literal["amx", "bf16dot", "avx512", "avx2", "neon", "plain"]
"""The instructions that kernels use; `plain` means PyTorch's own operations."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """One choice of a Submit. `prompt` is the index of the choice's prompt.

    `choice` is the number k in the random generator's counter (i, k). After a recovery, `generated`
    has the tokens (packed int32) that were already delivered, and `state` has the samplers' state
    after these tokens.
    """

    sequence_id: SequenceId
    prompt: int
    choice: int
    generated: bytes = b""
    state: bytes = b""


class Submit(Message, frozen=True):
    """Start all choices of one stream.

    `prompts` are token ids (packed int32). `arrival` is in seconds of the monotonic clock.
    """

    stream_id: StreamId
    prompts: tuple[bytes, ...]
    sequences: tuple[NewSequence, ...]
    sampling: Sampling
    arrival: float
    priority: int = 0
    # Only requests with equal salts share cached prefixes.
    salt: str = ""
    use_prefix: bool = True  # whether cached prefixes may be used
    # Whether an earlier engine died during a step with one of these sequences.
    suspect: bool = False
    # The id of the client. The scheduler lets clients take turns.
    client: str = ""
    # The inputs of each prompt besides tokens. The tuple is empty if all prompts are tokens only.
    inputs: tuple[PromptInputs, ...] = ()
    # The fingerprint of the adapter is also part of `salt`.
    adapter: Adapter | None = None


class Cancel(Message, frozen=True):
    """End these sequences. The engine ignores unknown and finished sequences."""

    sequence_ids: tuple[SequenceId, ...]
    finish: FinishReason = FinishReason.CANCELLED


class LoadAdapter(Message, frozen=True):
    """Read an adapter before a Submit needs the adapter. The engine answers with AdapterRead."""

    adapter: Adapter


class DropAdapter(Message, frozen=True):
    """Forget an adapter that no request uses any more."""

    fingerprint: str


class AdapterRead(Message, frozen=True):
    """The engine has read an adapter, or could not read the adapter.

    After a failure, `code` and `message` say why.
    """

    fingerprint: str
    code: str = ""
    message: str = ""


class Shutdown(Message, frozen=True):
    """Stop the engine's loop, and drop all running sequences."""


class Ping(Message, frozen=True):
    """Ask for a Pong. A separate thread answers, not the thread that runs the steps."""

    number: int


class Pong(Message, frozen=True):
    number: int


class LaneFacts(msgspec.Struct, frozen=True):
    """How a lane (a way to run a model) processes prompts."""

    memory: str = "blocks"  # blocks or slot
    # `none`: the kernel uses lengths instead of a mask. `lazy-prefix`: a mask is made for each
    # chunk. `bidirectional`: each token of an encoder attends to the whole input.
    mask: str = "none"
    why: str = ""  # the reason for the choice of memory, if any
    # How the lane encodes images, or the prompts of an encoder-decoder. `pieces`: over several
    # steps. `whole`: in one step. None: the lane has no encoder.
    encoder: str | None = None


class DraftFacts(msgspec.Struct, frozen=True):
    """Describes the draft model, which chooses guesses for the served model."""

    name: str
    num_parameters: int
    weight_bytes: int
    position_bytes: int  # bytes that the draft model caches for each token
    max_positions: int
    fingerprint: str
    # Whether the draft model is the MTP layer of the served model.
    is_own: bool = False


class Ready(Message, frozen=True):
    """Describes the loaded model, its lane and its limits.

    The engine sends this message after a load.
    """

    lane: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    # The maximum number of sequences that run at the same time. Both the setting and the number
    # of slots limit this number.
    max_num_seqs: int
    num_parameters: int
    weight_bytes: int  # bytes in memory
    layout: MemoryLayout
    # 12 hexadecimal digits of a hash over version, weights, dtype, device kind and kernels.
    fingerprint: str
    max_step_tokens: int = 0
    max_stall_s: float | None = None  # None: no stall target
    # The largest value that the stall target may take. Only the default target may rise, so for any
    # other target this value equals `max_stall_s`.
    highest_stall_s: float | None = None
    kernels: InstructionSet = "plain"
    kernels_reason: str = ""  # reason for the choice of kernels
    tasks: tuple[str, ...] = ("generate",)  # subset of generate, embed and score
    # Whether each prompt is processed as a whole, never in chunks.
    is_whole: bool = False
    vector_size: int = 0  # numbers in an embedding; 0: no embeddings
    # How the rows of a prompt, one for each token, become one vector.
    pooling: tuple[PoolingMode, ...] = ("last",)
    facts: LaneFacts = LaneFacts()
    # Set only for an encoder-decoder, whose encoder processes the prompt.
    source: SourceSpec | None = None
    quantize: Quantize = "none"
    # Bytes of experts in a mapped file. An expert is read from disk when a token needs the expert.
    mapped_bytes: int = 0
    draft: DraftFacts | None = None
    kv_cache_dtype: KvCacheDtype = "auto"


class LoadFailed(Message, frozen=True):
    """The model cannot be served, for this reason.

    The engine sends this message instead of Ready.
    """

    code: str
    message: str


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A sequence was planned for the first time.

    `cached` of the `total` prompt tokens came from the cache.
    """

    sequence_id: SequenceId
    total: int
    cached: int


class PromptAdvance(msgspec.Struct, frozen=True, array_like=True):
    """`processed` tokens of the prompt are done, including those from the cache."""

    sequence_id: SequenceId
    processed: int


class NewToken(msgspec.Struct, frozen=True, array_like=True):
    sequence_id: SequenceId
    token_id: int
    logprobs: Logprobs | None = None
    # The samplers' state. Within a step, only the last token of a sequence has a state.
    state: bytes = b""


class Guessed(msgspec.Struct, frozen=True, array_like=True):
    """A step verified `num_tokens` guessed tokens. `num_right` of these guesses were right.

    `Outputs.tokens` also contains the right tokens. `is_drafted` says whether a draft model chose
    the guessed tokens.
    """

    sequence_id: SequenceId
    num_tokens: int
    num_right: int
    is_drafted: bool = False


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of the prompt tokens from index `start` on, one row per token."""

    sequence_id: SequenceId
    start: int
    logprobs: Logprobs


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A sequence has ended, and its memory is free now.

    `code` and `message` are set if `finish` is ERROR. A sequence for an embedding or a score
    generates no tokens; its result is `vector` (packed float32).
    """

    sequence_id: SequenceId
    finish: FinishReason
    code: str = ""
    message: str = ""
    vector: bytes = b""


class Outputs(Message, frozen=True, omit_defaults=True):
    """The events of planning or committing one step, which happened in the order of the fields."""

    started: tuple[Started, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    progress: tuple[PromptAdvance, ...] = ()
    guessed: tuple[Guessed, ...] = ()
    tokens: tuple[NewToken, ...] = ()
    finished: tuple[Finished, ...] = ()


NUM_TRACED_STEPS = 120
"""Number of recent steps whose traces are kept."""


class StepTrace(msgspec.Struct, frozen=True, array_like=True):
    """Measurements of one committed step. Times are in seconds."""

    num_decoding: int
    num_prompt_tokens: int
    predicted: float  # predicted time; 0: no measurements yet
    actual: float  # time in the runner
    # Time since the previous commit. If the engine was idle before, time since the step was
    # planned.
    elapsed: float
    # Time in the step that is left for prompts. None: no target, or no measurements yet.
    room: float | None
    # Why the step was expected to miss the stall target (--max-stall-ms).
    cause: str
    # The stall target in seconds; None if there is no target. The default target can rise.
    stall_target: float | None = None


class Status(Message, frozen=True):
    """Figures for people and metrics.

    The engine sends a Status at most four times a second, and only while something changes.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    blocks_free: int
    slots_free: int
    num_steps: int
    # Waiting sequences, one per stream. The first one starts next.
    queue: tuple[SequenceId, ...] = ()
    prompt_tokens_per_s: float = 0.0
    missed: dict[str, int] = {}  # number of missed stall targets by cause
    steps: tuple[StepTrace, ...] = ()  # steps since the previous Status
    num_preemptions: int = 0
    num_guessed: int = 0  # guessed tokens
    # The number of right guesses. Each right guess saved one step.
    num_accepted: int = 0
    # Figures about prefixes on disk: runs, tokens, read_bytes and written_bytes.
    disk: dict[str, int] = {}
    # The number of prefixes that were processed again instead of read from disk, by reason.
    disk_misses: dict[str, int] = {}
    # The guessed tokens that the draft model chose, and how many of these guesses were right.
    num_drafted: int = 0
    num_drafted_right: int = 0


WEIGHTS = "loading weights"


class Loading(Message, frozen=True):
    """Reports the progress of a load, before Ready.

    `share` is the finished fraction of the stage, or 0 if unknown.
    """

    share: float
    stage: str = WEIGHTS
    detail: str = ""  # text for people
