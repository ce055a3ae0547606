"""The jobs of workers: one tagged union of what they are asked, and the nouns they answer with.

A body travels beside its job, in pieces, as raw bytes; a job that answers with bytes, too.
"""

from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args

import msgspec

from headrace_common.errors import RequestError
from headrace_common.plan import PromptInputs
from headrace_common.request import Prompt, Route

R = TypeVar("R")


class KnownModel(msgspec.Struct, frozen=True):
    """A model as the gateway knows it, by a number that no other had, and its limit in tokens."""

    number: int
    max_model_len: int


class Encoded(msgspec.Struct, frozen=True):
    """Packed int32 ids of each prompt, and how they came about: one-shot, streamed or given."""

    prompts: tuple[bytes, ...]
    tokenization: str | None = None
    num_first: int = 0  # tokens of a pair that are its first text's
    changes: tuple[str, ...] = ()  # made in messages that the chat template refused


class EncodedAhead(msgspec.Struct, frozen=True):
    """The answer to EncodePrompts or EncodePairs, as the model of this number gives it."""

    number: int
    longest: int
    encoded: Encoded


class CheckedBody(msgspec.Struct, frozen=True):
    """A body as a worker checked it. Only `packed` and `kept` grow with it; they stay unopened."""

    fields: dict[str, Any]  # but for the prompts
    stubs: tuple[Prompt, ...]  # the prompts without their content
    packed: bytes  # the prompts, for EncodePrompts; query and documents, for EncodePairs
    largest_id: int = -1  # of all ids in the prompts, and where it stands
    largest_path: str = ""
    digest: bytes = b""
    ignored: tuple[str, ...] = ()  # names of fields that have no effect here
    kept: bytes = b""  # stored with the stream
    inserted: dict[str, str] = {}  # texts of its client's that were left out, by their names
    ahead: EncodedAhead | None = None  # tokens of `packed`, which may save asking for them


class SeenImages(msgspec.Struct, frozen=True):
    """Packed int32 ids of a chat with images, and the inputs that stand for those."""

    token_ids: bytes
    inputs: PromptInputs
    changes: tuple[str, ...] = ()  # as in Encoded


class Refusal(msgspec.Struct, frozen=True):
    """A RequestError on its way between processes."""

    code: str
    message: str
    param: str | None
    extra: dict[str, int]
    noted: dict[str, int | str]

    @classmethod
    def of(cls, error: RequestError) -> "Refusal":
        return cls(error.code, error.message, error.param, error.extra, error.noted)

    def error(self) -> RequestError:
        error = RequestError(self.code, self.message, self.param, self.extra)
        return error.noting(**self.noted)


class Job(msgspec.Struct, Generic[R], frozen=True, tag=True):
    """Root of the union, generic in its result; carries nothing."""

    is_for_images: ClassVar[bool] = False  # done by the worker that is for them, where there is one


Known = dict[str, KnownModel]
"""Models by their first names; the text for one of them is tokenized as it is read."""


class ReadBody(Job[CheckedBody], frozen=True, tag=True):
    """Check the body of a generation route, sent by this client, if that is one we know."""

    route: Route
    known: Known = {}
    client: str = ""
    task: ClassVar[str] = "generate"


class ReadInputs(Job[CheckedBody], frozen=True, tag=True):
    """Check the body of /v1/embeddings; `is_list` is among its fields.

    With `is_prompt` the input may be called `prompt`, as in Ollama's older route. With
    `may_be_empty` the input may be empty or missing; then the fields have `is_empty`.
    """

    known: Known = {}
    is_prompt: bool = False
    may_be_empty: bool = False
    task: ClassVar[str] = "embed"


class ReadPairs(Job[CheckedBody], frozen=True, tag=True):
    """Check the body of /v1/rerank."""

    known: Known = {}
    task: ClassVar[str] = "score"


class GoOn(Job[CheckedBody], frozen=True, tag=True):
    """Put the conversation that it goes on from before a response's, and items for references.

    Packed: what was kept of the earlier response, its output, the body, and the first two of each
    response that is referred to.
    """


class EncodePrompts(Job[Encoded], frozen=True, tag=True):
    """Tokenize packed prompts; none follow one of more than `longest` tokens."""

    longest: int
    model: str | None = None
    to_embed: bool = False  # texts are cut where the model's makers cut them


class EncodePairs(Job[Encoded], frozen=True, tag=True):
    """Tokenize a packed query with each document; none follow one of more than `longest` tokens."""

    longest: int
    model: str | None = None


class PutImages(Job[bytes], frozen=True, tag=True):
    """Put fetched images, of these sizes, into the packed chat before them; 0: it came along."""

    sizes: tuple[int, ...]


class SeeImages(Job[SeenImages], frozen=True, tag=True):
    """Prepare a packed chat with images, whose tensors are written to `path`."""

    path: str
    model: str
    is_for_images: ClassVar[bool] = True


VectorForm = Literal["float", "base64", "bare"]
"""A vector's numbers or their bytes in an object of their own, or nothing but the numbers."""


class WriteVectors(Job[bytes], frozen=True, tag=True):
    """Write packed vectors of `size` bytes each as entries of an answer, numbered from `first`.

    They are cut to `dimensions` numbers, and then have length 1 again if they are `units`.
    """

    size: int
    first: int
    dimensions: int | None
    form: VectorForm
    are_units: bool = True


class RankDocuments(Job[bytes], frozen=True, tag=True):
    """Write the packed documents as the results of an answer, by their scores in `vectors`."""

    vectors: bytes
    model: str
    top_n: int | None
    shows_documents: bool


class ListInput(Job[bytes], frozen=True, tag=True):
    """Write a page of what led to a response, of which `kept` is the body."""

    stream_id: str
    limit: int
    is_rising: bool
    after: str


class ReadModelName(Job[str], frozen=True, tag=True):
    """Read `model`, which is required."""


ModelsNamedIn = Literal["body", "lines", "requests"]
"""One body, lines of a batch with a body each, or a body with many `requests`."""


class NameModels(Job[tuple[str, ...]], frozen=True, tag=True):
    """List the served models that a job for this body would use, each once."""

    place: ModelsNamedIn


class ReadNames(Job[tuple[str, ...]], frozen=True, tag=True):
    """Read the non-empty strings of `conversation_ids`."""


class Tokenize(Job[bytes], frozen=True, tag=True):
    """Answer /tokenize; `max_model_len` is that of each known model, by its first name."""

    max_model_len: dict[str, int]


class TokenCount(msgspec.Struct, frozen=True):
    """The length of a prompt, and the paths in its body that have no effect."""

    num_tokens: int
    ignored: tuple[str, ...] = ()


class CountTokens(Job[TokenCount], frozen=True, tag=True):
    """Count the tokens of a body for /v1/messages, as sent by this client if it is a known one."""

    client: str = ""


class Detokenize(Job[bytes], frozen=True, tag=True):
    """Answer /detokenize."""


class ApplyTemplate(Job[bytes], frozen=True, tag=True):
    """Answer /apply-template."""


class LineFault(msgspec.Struct, frozen=True):
    """The reason why a line of a batch cannot be answered."""

    line: int
    code: str
    message: str
    param: str | None = None


class CheckedLines(msgspec.Struct, frozen=True):
    """Lines of a batch as a worker checked them."""

    num_lines: int  # that are not blank
    digests: bytes  # of their custom_ids, 16 bytes each
    models: dict[str, int]  # that they name, and the first line that does
    faults: tuple[LineFault, ...]


class CheckLines(Job[CheckedLines], frozen=True, tag=True):
    """Check lines of a batch, numbered from `first`, for this route."""

    first: int
    route: Route


class OpenedLine(msgspec.Struct, frozen=True):
    custom_id: str
    body: bytes


class OpenLine(Job[OpenedLine], frozen=True, tag=True):
    """Take the body out of a line that was checked."""


class BatchAsked(msgspec.Struct, frozen=True):
    """The body of /v1/batches."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str]


class ReadBatch(Job[BatchAsked], frozen=True, tag=True):
    """Check the body of /v1/batches."""


class SplitRequests(Job[bytes], frozen=True, tag=True):
    """Check the body of /v1/messages/batches, and make lines of its requests."""

    most: int
    route: Route


ReadJob = ReadBody | ReadInputs | ReadPairs
AnyJob = (
    ReadBody
    | ReadInputs
    | ReadPairs
    | GoOn
    | EncodePrompts
    | EncodePairs
    | PutImages
    | SeeImages
    | WriteVectors
    | RankDocuments
    | ListInput
    | CheckLines
    | OpenLine
    | ReadBatch
    | SplitRequests
    | ReadModelName
    | NameModels
    | ReadNames
    | Tokenize
    | CountTokens
    | Detokenize
    | ApplyTemplate
)

_ENCODER = msgspec.msgpack.Encoder()
_JOBS: msgspec.msgpack.Decoder[AnyJob] = msgspec.msgpack.Decoder(AnyJob)
_RESULTS = {
    job: None if result is bytes else msgspec.msgpack.Decoder(result)
    for job in get_args(AnyJob)
    for result in get_args(job.__orig_bases__[0])
}


def encode_job(job: Job[Any]) -> bytes:
    return _ENCODER.encode(job)


def decode_job(packed: bytes) -> AnyJob:
    return _JOBS.decode(packed)


def encode_result(result: object) -> bytes:
    return result if isinstance(result, bytes) else _ENCODER.encode(result)


def decode_result(job: Job[R], packed: bytes) -> R:
    """The result as the job states it."""
    decoder = _RESULTS[type(job)]
    return cast(R, packed if decoder is None else decoder.decode(packed))
