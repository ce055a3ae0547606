"""Defines the jobs of worker processes as a tagged union, and the results of these jobs.

A request's body is sent separately from the job, as raw bytes in pieces. Results that are bytes
are sent in the same way.
"""

from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args

import msgspec

from headrace_common.errors import RequestError
from headrace_common.plan import PromptInputs
from headrace_common.request import Prompt, Route

R = TypeVar("R")


class KnownModel(msgspec.Struct, frozen=True):
    """A model that the gateway serves, with a unique number and a limit in tokens."""

    number: int
    max_model_len: int


class Encoded(msgspec.Struct, frozen=True):
    """The token ids of each prompt, packed int32.

    `tokenization` says how the ids were made: one-shot, streamed or given.
    """

    prompts: tuple[bytes, ...]
    tokenization: str | None = None
    nums_first: tuple[int, ...] = ()  # tokens of each pair's first text
    # Changes that were made because the chat template refused the original messages.
    changes: tuple[str, ...] = ()


class EncodedAhead(msgspec.Struct, frozen=True):
    """The result of EncodePrompts or EncodePairs, computed in advance.

    `number` identifies the KnownModel whose tokenizer was used.
    """

    number: int
    longest: int
    encoded: Encoded


class CheckedBody(msgspec.Struct, frozen=True):
    """A body that a worker has checked.

    `packed` and `kept` can be as large as the body, so the gateway does not decode them.
    """

    fields: dict[str, Any]  # fields of the body without the prompts
    stubs: tuple[Prompt, ...]  # the prompts without their content
    packed: bytes  # prompts for EncodePrompts, or the texts for EncodePairs
    largest_id: int = -1  # largest token id in the prompts; -1: none
    largest_path: str = ""
    digest: bytes = b""
    ignored: tuple[str, ...] = ()  # names of fields that have no effect here
    kept: bytes = b""  # data that is stored with the stream
    # The texts that the worker removed, by name. The client program had inserted these texts.
    inserted: dict[str, str] = {}
    # The token ids of `packed`. If they are set, no EncodePrompts job is needed.
    ahead: EncodedAhead | None = None

    @property
    def num_bytes(self) -> int:
        """The memory of the fields whose size is not limited otherwise."""
        ahead = self.ahead.encoded.prompts if self.ahead else ()
        return len(self.packed) + len(self.kept) + sum(map(len, ahead))


class SeenImages(msgspec.Struct, frozen=True):
    """Packed int32 ids of a chat with images, and the inputs for its images."""

    token_ids: bytes
    inputs: PromptInputs
    changes: tuple[str, ...] = ()  # changes as in Encoded


class Refusal(msgspec.Struct, frozen=True):
    """A RequestError in a form that can be sent between processes."""

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


class Job(msgspec.Struct, Generic[R], frozen=True, tag=True, kw_only=True):
    """The base of all jobs, generic in the result type.

    If `dialect` is set, the dialect (an API's format) with this route executes the job.
    """

    # The id of the API key of the request, which the pool sets. Empty if the server has no keys.
    owner: str = ""

    # Whether the worker for images executes the job. Without such a worker, any worker does.
    is_for_images: ClassVar[bool] = False
    dialect: ClassVar[Route | None] = None


Known = dict[str, KnownModel]
"""Models by main name. The worker immediately tokenizes a body for one of these models."""


class ReadBody(Job[CheckedBody], frozen=True, tag=True):
    """Check the body of a generation route.

    `client` names the program that sent the body, or is empty.
    """

    route: Route
    known: Known = {}
    client: str = ""
    task: ClassVar[str] = "generate"


class ReadInputs(Job[CheckedBody], frozen=True, tag=True):
    """Check the body of /v1/embeddings. The result's `fields` contain `is_list`.

    With `is_prompt` the input may be called `prompt`, as in Ollama's older route. With
    `may_be_empty` the input may be empty or missing; `fields` contain `is_empty` in this case.
    """

    known: Known = {}
    is_prompt: bool = False
    may_be_empty: bool = False
    task: ClassVar[str] = "embed"


class ReadPairs(Job[CheckedBody], frozen=True, tag=True):
    """Check the body of a route that ranks or scores texts."""

    route: Route = "/v1/rerank"
    known: Known = {}
    task: ClassVar[str] = "score"


class ContinueResponse(Job[CheckedBody], frozen=True, tag=True):
    """Put the earlier conversation before the input of a response, and resolve item references.

    The packed bytes contain the request's body. They also contain the kept data and the output of
    the earlier response, and of each referenced response.
    """

    # The id of the newest stream of a conversation. Empty with `previous_response_id`.
    newest: str = ""
    dialect: ClassVar[Route] = "/v1/responses"


class FitResponse(Job[CheckedBody], frozen=True, tag=True):
    """Tokenize the chat of a response; drop its oldest items if it exceeds `room` tokens.

    The packed bytes are the request's CheckedBody. The result has the tokens in `ahead`, which
    are valid for this model and the limit `longest`.
    """

    room: int
    longest: int
    number: int
    dialect: ClassVar[Route] = "/v1/responses"


class FitImages(FitResponse, frozen=True, tag=True):
    """Like FitResponse, for a chat with images, whose tokens count, too.

    The packed bytes contain the images. If the shortened chat still has images, the result's
    `ahead` is not set.
    """

    is_for_images: ClassVar[bool] = True


class SummarizeResponse(Job[CheckedBody], frozen=True, tag=True):
    """Turn the request of a response into a request for a summary of its conversation.

    The packed bytes are the request's CheckedBody. If a summary could not replace any item, `stubs`
    of the result is empty unless `is_asked`.
    """

    max_tokens: int
    is_asked: bool = False
    dialect: ClassVar[Route] = "/v1/responses"


class PutSummary(Job[CheckedBody], frozen=True, tag=True):
    """Replace the items in a response's prompt by a summary; the stored items stay complete.

    The packed bytes are the request's CheckedBody. `usage` is the usage of the summary's request.
    """

    summary: str
    usage: dict[str, Any]
    dialect: ClassVar[Route] = "/v1/responses"


class WriteCompaction(Job[bytes], frozen=True, tag=True):
    """Write the answer of /v1/responses/compact. The packed bytes are the request's `kept`."""

    stream_id: str
    created: int
    summary: str
    usage: dict[str, Any]
    dialect: ClassVar[Route] = "/v1/responses"


ShortenResponse = FitResponse | SummarizeResponse | PutSummary | WriteCompaction


class EncodePrompts(Job[Encoded], frozen=True, tag=True):
    """Tokenize packed prompts. Stops after a prompt of more than `longest` tokens.

    Only jobs with the same owner and `cache_salt` share cached ids; None disables caching.
    """

    longest: int
    model: str | None = None
    to_embed: bool = False  # whether texts are cut at the model's limit for embeddings
    cache_salt: str | None = None


class EncodePairs(Job[Encoded], frozen=True, tag=True):
    """Tokenize a packed query with each document.

    Stops after a pair of more than `longest` tokens.
    """

    longest: int
    model: str | None = None


class PutImages(Job[bytes], frozen=True, tag=True):
    """Put downloaded images into a packed chat.

    `sizes` has the bytes of each image, or 0 if the request's body contained the image.
    """

    sizes: tuple[int, ...]


class SeeImages(Job[SeenImages], frozen=True, tag=True):
    """Prepare the images of a packed chat, and write their tensors to `path`."""

    path: str
    model: str
    is_for_images: ClassVar[bool] = True


VectorForm = Literal["float", "base64", "bare"]
"""The format of a vector in an answer: an object with numbers or base64, or bare numbers."""


class WriteVectors(Job[bytes], frozen=True, tag=True):
    """Write packed vectors of `size` bytes each as entries of an answer, numbered from `first`.

    Each vector is cut to `dimensions` numbers. With `are_units`, cut vectors are normalized again.
    """

    size: int
    first: int
    dimensions: int | None
    form: VectorForm
    are_units: bool = True


class RankDocuments(Job[bytes], frozen=True, tag=True):
    """Write the packed documents as results, ranked by their scores in `vectors`."""

    vectors: bytes
    model: str
    top_n: int | None
    shows_documents: bool


class WriteScores(Job[bytes], frozen=True, tag=True):
    """Write the scores in `vectors` for the packed pairs of texts, in the order of the pairs."""

    vectors: bytes
    model: str


class ListInput(Job[bytes], frozen=True, tag=True):
    """Write a page of a response's input items. The job's body is the response's kept data."""

    stream_id: str
    limit: int
    is_rising: bool
    after: str
    dialect: ClassVar[Route] = "/v1/responses"


class UsedConversation(msgspec.Struct, frozen=True):
    """The JSON of an answer of /v1/conversations, and the new kept data; empty if unchanged."""

    answer: bytes
    kept: bytes = b""


class UseConversation(Job[UsedConversation], frozen=True, tag=True):
    """Answer a request of /v1/conversations for the conversation `id`.

    The packed bytes contain the kept data and the output of the conversation's newest stream
    `stream_id`, and the request's body. `new_id` is the id of the stream that stores a change.
    """

    what: Literal["create", "show", "update", "add", "remove", "copy", "item", "list"]
    id: str
    stream_id: str = ""
    new_id: str = ""
    created: int = 0
    item: str = ""
    limit: int = 0
    is_rising: bool = False
    after: str = ""
    dialect: ClassVar[Route] = "/v1/responses"


class ReadModelName(Job[str], frozen=True, tag=True):
    """Read the required field `model` of a body."""


ModelsNamedIn = Literal["body", "lines", "requests"]
"""A body is one request, batch lines with a request each, or an object with `requests`."""


class NameModels(Job[tuple[str, ...]], frozen=True, tag=True):
    """List each served model that the requests in this body would use."""

    place: ModelsNamedIn


class ReadNames(Job[tuple[str, ...]], frozen=True, tag=True):
    """Read the non-empty strings of `conversation_ids`."""


class Tokenize(Job[bytes], frozen=True, tag=True):
    """Answer /tokenize. `max_model_len` has each model's limit in tokens, by main name."""

    max_model_len: dict[str, int]


class TokenCount(msgspec.Struct, frozen=True):
    """The length of a prompt, and the paths of body fields that have no effect."""

    num_tokens: int
    ignored: tuple[str, ...] = ()


class CountTokens(Job[TokenCount], frozen=True, tag=True):
    """Count the tokens of a body for /v1/messages.

    `client` names the program that sent the body, or is empty.
    """

    client: str = ""
    dialect: ClassVar[Route] = "/v1/messages"


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
    """Batch lines that a worker has checked."""

    num_lines: int  # number of lines that are not blank
    digests: bytes  # digests of the lines' custom_ids, 16 bytes each
    models: dict[str, int]  # first line with each model, by the model's name
    faults: tuple[LineFault, ...]


class CheckLines(Job[CheckedLines], frozen=True, tag=True):
    """Check batch lines for this route. The lines are numbered from `first`."""

    first: int
    route: Route


class OpenedLine(msgspec.Struct, frozen=True):
    custom_id: str
    body: bytes


class OpenLine(Job[OpenedLine], frozen=True, tag=True):
    """Extract custom_id and body from a checked line."""


class BatchBody(msgspec.Struct, frozen=True):
    """The body of /v1/batches."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] = {}


class ReadBatch(Job[BatchBody], frozen=True, tag=True):
    """Check the body of /v1/batches."""


class SplitRequests(Job[bytes], frozen=True, tag=True):
    """Check the body of /v1/messages/batches, and turn its requests into batch lines."""

    most: int
    route: Route


ReadJob = ReadBody | ReadInputs | ReadPairs
AnyJob = (
    ReadBody
    | ReadInputs
    | ReadPairs
    | ContinueResponse
    | FitResponse
    | FitImages
    | SummarizeResponse
    | PutSummary
    | WriteCompaction
    | EncodePrompts
    | EncodePairs
    | PutImages
    | SeeImages
    | WriteVectors
    | RankDocuments
    | WriteScores
    | ListInput
    | UseConversation
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
    """Decode the result according to the job's type."""
    decoder = _RESULTS[type(job)]
    return cast(R, packed if decoder is None else decoder.decode(packed))
