"""The messages between generation and the engine: one tagged union, in process or on a socket."""

import enum
from typing import Literal

import msgspec

from headrace_common.adapter import Adapter
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import PromptInputs, SourceSpec
from headrace_common.sampling import Logprobs, PoolingMode, Sampling

Quantize = Literal["none", "int8", "int4", "own"]
"""How linear weights are kept: as they are, in 8 bits, in 4, or as the GGUF file has them."""
InstructionSet = Literal["amx", "bf16dot", "avx512", "avx2", "neon", "plain"]
"""Instructions that kernels are made of; plain: torch's own products and attention."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, tag=True):
    """Root of the union; carries nothing."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """One choice of a Submit: `prompt` indexes its prompts, `choice` is the k of its random draws.

    `generated` holds the tokens (packed int32) that were already delivered before a recovery.
    """

    sequence_id: SequenceId
    prompt: int
    choice: int
    generated: bytes = b""


class Submit(Message, frozen=True):
    """All choices of one stream. `prompts` are packed int32; `arrival` is monotonic seconds."""

    stream_id: StreamId
    prompts: tuple[bytes, ...]
    sequences: tuple[NewSequence, ...]
    sampling: Sampling
    arrival: float
    priority: int = 0
    salt: str = ""  # prefixes are shared among equal salts only
    use_prefix: bool = True  # whether cached prefixes may be taken
    suspect: bool = False  # was in the step in which the engine died
    client: str = ""  # who asks: clients take turns
    inputs: tuple[PromptInputs, ...] = ()  # of each prompt; empty: they are tokens alone
    adapter: Adapter | None = None  # that changes the model for it; `salt` tells it, too


class Cancel(Message, frozen=True):
    """End these sequences; unknown and finished ones are ignored."""

    sequence_ids: tuple[SequenceId, ...]
    finish: FinishReason = FinishReason.CANCELLED


class LoadAdapter(Message, frozen=True):
    """Read an adapter; AdapterRead answers. One that a Submit names is read without being asked."""

    adapter: Adapter


class DropAdapter(Message, frozen=True):
    """Forget an adapter: nobody uses it any more."""

    fingerprint: str


class AdapterRead(Message, frozen=True):
    """An adapter is in memory, or cannot be had: `code` and `message` then say why."""

    fingerprint: str
    code: str = ""
    message: str = ""


class Shutdown(Message, frozen=True):
    """Leave the loop; sequences that still run are dropped."""


class Ping(Message, frozen=True):
    """Asks for a Pong, which a thread beside the step loop sends."""

    number: int


class Pong(Message, frozen=True):
    number: int


class LaneFacts(msgspec.Struct, frozen=True):
    """How a lane computes prompts."""

    memory: str = "blocks"  # or slot
    mask: str = "none"  # the kernel knows lengths; or lazy-prefix: one is made for each chunk;
    # or bidirectional: an encoder's, over whole inputs
    why: str = ""  # what decided on the memory, where something did
    encoder: str | None = None  # of sources or images: pieces or whole


class Ready(Message, frozen=True):
    """First message of an engine: it has loaded, and these are its limits."""

    lane: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int  # that run at once, by the setting and by the slots there are
    num_parameters: int
    weight_bytes: int  # in memory
    layout: MemoryLayout
    fingerprint: str  # 12 hex digits over version, weights, dtype, kind of device and kernels
    max_step_tokens: int = 0
    max_stall_s: float | None = None  # the stall target, if there is one
    kernels: InstructionSet = "plain"
    kernels_reason: str = ""  # why it is this one
    tasks: tuple[str, ...] = ("generate",)  # of generate, embed and score
    is_whole: bool = False  # prompts are never cut
    vector_size: int = 0  # of an embedding; 0: the model gives none
    pooling: tuple[PoolingMode, ...] = ("last",)  # by which its prompts become vectors
    facts: LaneFacts = LaneFacts()
    source: SourceSpec | None = None  # if prompts are sources to encode
    quantize: Quantize = "none"
    mapped_bytes: int = 0  # of experts that lie in a mapped file, and are read as they are chosen


class LoadFailed(Message, frozen=True):
    """Instead of Ready: the model cannot be served, and why."""

    code: str
    message: str


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A sequence was first planned; `cached` of its `total` prompt tokens came from the cache."""

    sequence_id: SequenceId
    total: int
    cached: int


class PromptAdvance(msgspec.Struct, frozen=True, array_like=True):
    """`processed` prompt tokens are computed, cached ones included."""

    sequence_id: SequenceId
    processed: int


class NewToken(msgspec.Struct, frozen=True, array_like=True):
    sequence_id: SequenceId
    token_id: int
    logprobs: Logprobs | None = None


class Guessed(msgspec.Struct, frozen=True, array_like=True):
    """A step guessed tokens of a sequence, and so many were right: they are among the new ones."""

    sequence_id: SequenceId
    num_tokens: int
    num_right: int


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Rows for the prompt tokens from number `start` on."""

    sequence_id: SequenceId
    start: int
    logprobs: Logprobs


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The terminal outcome of a sequence; its memory is free. `code` and `message` if ERROR.

    `vector` (packed float32) if it drew nothing and was computed for that.
    """

    sequence_id: SequenceId
    finish: FinishReason
    code: str = ""
    message: str = ""
    vector: bytes = b""


class Outputs(Message, frozen=True, omit_defaults=True):
    """Everything that one plan or one commit reports, in the order of the fields."""

    started: tuple[Started, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    progress: tuple[PromptAdvance, ...] = ()
    guessed: tuple[Guessed, ...] = ()
    tokens: tuple[NewToken, ...] = ()
    finished: tuple[Finished, ...] = ()


NUM_TRACED_STEPS = 120
"""Recent steps that are kept; older ones are dropped."""


class StepTrace(msgspec.Struct, frozen=True, array_like=True):
    """A committed step, for measurements; times in seconds."""

    num_decoding: int
    num_prompt_tokens: int
    predicted: float  # 0 while unmeasured
    actual: float  # in the runner
    elapsed: float  # in all, since the plan or the commit before it
    room: float | None  # what prompts might have taken; None: no target, or none measured
    cause: str  # why it was expected to miss the stall target


class Status(Message, frozen=True):
    """Figures for people and metrics, at most four times a second while something changes."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    blocks_free: int
    slots_free: int
    num_steps: int
    queue: tuple[SequenceId, ...] = ()  # those waiting, next one first; siblings are not named
    prompt_tokens_per_s: float = 0.0
    missed: dict[str, int] = {}  # stall targets, by cause
    steps: tuple[StepTrace, ...] = ()  # the last of those since the Status before
    num_preemptions: int = 0
    num_guessed: int = 0  # tokens
    num_accepted: int = 0  # guessed tokens that were right: each saved its stream a step
    disk: dict[str, int] = {}  # of prefixes there: runs, tokens, read_bytes, written_bytes
    disk_misses: dict[str, int] = {}  # runs that had to be computed, by reason


WEIGHTS = "loading weights"


class Loading(Message, frozen=True):
    """Progress of a load, before Ready. `share` of the stage is done; 0 where nobody knows."""

    share: float
    stage: str = WEIGHTS
    detail: str = ""  # for people
