"""The models a server serves, as the gateway's process knows them: names, text, limits."""

import time
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from headrace import __version__
from headrace.checkpoints.find import find_here, find_model
from headrace.checkpoints.hub import OnProgress
from headrace.checkpoints.sentences import read_sentences
from headrace.checkpoints.spec import ModelSpec, read_spec
from headrace.config.settings import ModelConfig
from headrace.core.errors import ModelError, RequestError
from headrace.core.messages import Ready
from headrace.core.request import Chat, Ids, Request
from headrace.generation.model_names import Named, names_of, paths_of, root_of
from headrace.models.registry import SEEING
from headrace.streams.record import Record, ServedForm
from headrace.text.encoder import Encoder
from headrace.text.output_splitter import reasoning_format
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import tool_format
from headrace.workers.image_file import Admitted, see_images
from headrace.workers.pool import Work

_PROMPT_FIELDS = {"/v1/responses": "input"}  # where it has another name than usual
_SHOWN = 100  # characters of an unknown name
_UNKNOWN = 1 << 30  # tokens; where no limit is known, none is checked


class EncodedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """Packed int32 ids, and how they came about: one-shot, streamed or given."""

    token_ids: bytes
    tokenization: str


encoded_of = msgspec.msgpack.Decoder(tuple[EncodedPrompt, ...]).decode


class ServedModel:
    """One model. `ready` holds the engine's limits once it has loaded."""

    def __init__(self, config: ModelConfig, on_progress: OnProgress | None = None) -> None:
        self.folder: Path = find_model(config.model, config.revision, on_progress)
        self.root = root_of(config)
        self.names = names_of(config)
        self.paths = paths_of(config)
        self.created = int(time.time())
        self.spec: ModelSpec = read_spec(self.folder)
        self.tokenizer = Tokenizer.load(self.folder)
        self.encoder = Encoder(self.tokenizer)
        self.template = self._load_template(config.chat_template)
        source = self.template.source if self.template else ""
        # by which the model writes tool calls and sets its reasoning apart; "" if it does not
        tools_source = self.template.tools_source if self.template else ""
        self.tool_format = _given(config.tool_format, tool_format(tools_source))
        self.reasoning_format = _given(config.reasoning_format, reasoning_format(source))
        self.sentences = read_sentences(self.spec)
        self._lane = config.lane
        self._max_model_len = config.max_model_len
        self.pooling = config.pooling
        self.cuts_any = config.embedding_dimensions == "any"  # vectors, to any length
        self.defaults = self.spec.defaults if config.generation_config == "auto" else None
        self.ready: Ready | None = None

    @property
    def sampling_words(self) -> str:
        """How it draws for a request that says nothing; "" if that is all the same to it."""
        shown = self.spec.is_gguf and self.defaults
        if not shown:
            return ""
        of_each = [(name, getattr(shown, name)) for name in shown.__struct_fields__]
        values = ", ".join(f"{name} {value:g}" for name, value in of_each if value is not None)
        return f"{self.names[0]} draws by {values} unless a request says otherwise"

    @property
    def has_vision(self) -> bool:
        """Whether it sees images."""
        return _has_vision(self.spec, self._lane)

    @property
    def has_native_vision(self) -> bool:
        """Whether it sees them in pieces, beside our own implementation of its text side."""
        return self.spec.architecture in SEEING and self._lane in ("auto", "native-multimodal")

    @property
    def has_source(self) -> bool:
        """Whether prompts are sources, and answers have a context of their own."""
        return self.spec.has_source

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens; until the engine says, what is asked for.

        0: neither the settings nor the model say.
        """
        if self.ready:
            return self.ready.max_model_len
        return min(filter(None, (self._max_model_len, self.spec.max_positions)), default=0)

    @property
    def system_fingerprint(self) -> str:
        return f"fp_{self.ready.fingerprint}" if self.ready else ""

    @property
    def form(self) -> ServedForm:
        ready = self.ready
        if ready is None:
            return ServedForm()
        return ServedForm(
            __version__,
            ready.dtype if ready.quantize == "none" else f"{ready.dtype} {ready.quantize}",
            f"{ready.device} with kernels {ready.kernels}",
            ready.max_model_len,
        )

    def _load_template(self, name: str | None) -> ChatTemplate | None:
        file = Path(name) if name else None
        if file and not file.is_file():
            raise ModelError(f"No chat template at {name}; give the path of a file.")
        return ChatTemplate.load(self.folder, self.tokenizer.special_tokens, file)


def _given(setting: str, found: str) -> str:
    return {"auto": found, "none": ""}.get(setting, setting)


ByName = TypeVar("ByName", bound=Named)


class Models(Generic[ByName]):
    """All that is served, by the names that clients ask for."""

    def __init__(self, models: tuple[ByName, ...]) -> None:
        self._models = models

    def all(self) -> tuple[ByName, ...]:
        return self._models

    @property
    def first(self) -> ByName:
        """What answers where no name is given."""
        return self._models[0]

    def find(self, name: str) -> ByName | None:
        """By a name, or else by the path that it was given by, which names no other."""
        named = next((model for model in self._models if name in model.names), None)
        return named or next((model for model in self._models if name in model.paths), None)

    def get(self, name: str | None) -> ByName:
        """The model that answers to `name`; without a name, the first one."""
        if name is None:
            return self.first
        if (model := self.find(name)) is not None:
            return model
        raise self.unknown(name)

    def unknown(self, name: str) -> RequestError:
        """The error for a name that no model has."""
        served = ", ".join(name for model in self._models for name in model.names)
        return RequestError(
            "model_not_found",
            f"No model {name[:_SHOWN]!r} is served here; there is: {served}.",
            "model",
        ).noting(asked=name[:_SHOWN], served=served)


def check_generates(model: ServedModel) -> None:
    """RequestError if the model draws no tokens."""
    if model.ready is not None and "generate" not in model.ready.tasks:
        route = "/v1/rerank" if "score" in model.ready.tasks else "/v1/embeddings"
        message = f"{model.names[0]} generates no text; use {route}, or serve another model."
        raise RequestError("unsupported_operation", message, "model")


def may_see_images(config: ModelConfig) -> bool:
    """Whether the model does, or is not here yet and so may."""
    try:
        folder = find_here(config.model, config.revision)
        return folder is None or _has_vision(read_spec(folder), config.lane)
    except ModelError:  # loading it will say so
        return False


def _has_vision(spec: ModelSpec, lane: str) -> bool:
    """A lane of text alone leaves the vision side out."""
    return "vision_config" in spec.config and spec.has_processor and not lane.endswith("-text")


async def admit(work: Work, model: ServedModel, request: Request, packed: bytes | None) -> Admitted:
    """The ids of each prompt; RequestError if one cannot be served.

    `packed` are the prompts, if the request has only stubs of them.
    """
    packed = msgspec.msgpack.encode(request.prompts) if packed is None else packed
    longest = _longest_prompt(model, request)
    if model.has_source and request.echo:
        message = "This model reads a source and does not go on with it; leave echo out."
        raise RequestError("unsupported_parameter", message, "echo")
    chats = [prompt for prompt in request.prompts if isinstance(prompt, Chat)]
    if any(chat.num_images or chat.images for chat in chats):
        admitted = await see_images(work, packed, longest, model.names[0])
    else:
        encoded = encoded_of(await work.do("prompts", [packed], longest, model.names[0]))
        how = max((prompt.tokenization for prompt in encoded), default=None)
        admitted = Admitted(tuple(prompt.token_ids for prompt in encoded), how)
    for number, token_ids in enumerate(admitted.prompts):
        _check_length(model, request, number, len(token_ids) // 4, longest)
    return admitted


def _longest_prompt(model: ServedModel, request: Request) -> int:
    """Tokens of the longest prompt that the model can answer."""
    if not model.max_model_len:
        return _UNKNOWN  # the engine will say
    if model.has_source:
        return model.max_model_len  # the answer has a context of its own
    return model.max_model_len - (request.sampling.max_tokens != 0)


def check_can_begin(record: Record, model: ServedModel) -> None:
    """RequestError if the model, now that it is loaded, does not do what was admitted before."""
    check_generates(model)
    longest = _longest_prompt(model, record.request)
    for number, token_ids in enumerate(record.prompts):
        _check_length(model, record.request, number, len(token_ids) // 4, longest)


async def see_again(
    work: Work, model: ServedModel, record: Record
) -> tuple[Admitted, RequestError | None]:
    """What a stream's images become after a restart; an error if that is no longer the same."""
    try:
        again = await admit(work, model, record.request, record.images)
    except RequestError as error:
        return Admitted(record.prompts), error
    if again.prompts == record.prompts:
        return again, None
    again.close()
    message = "The model now reads these images in another way. Send the request again."
    return Admitted(record.prompts), RequestError("model_changed", message)


def _check_length(
    model: ServedModel, request: Request, number: int, num_tokens: int, longest: int
) -> None:
    name = _PROMPT_FIELDS.get(request.route) or (
        "messages" if isinstance(request.prompts[number], Chat) else "prompt"
    )
    param = f"{name}[{number}]" if len(request.prompts) > 1 else name
    if num_tokens == 0:
        raise RequestError(
            "empty_prompt", "The prompt has no tokens; send at least one character.", param
        )
    if num_tokens > longest:
        limit = model.max_model_len
        # a long text is not read to its end; ids are all there
        count = num_tokens if isinstance(request.prompts[number], Ids) else f"at least {num_tokens}"
        raise too_long(limit, longest, param, str(count), num_tokens)


def too_long(limit: int, longest: int, param: str, count: str, num_tokens: int) -> RequestError:
    """`num_tokens`, `count` in words, in a context of `limit`, of which `longest` may be taken."""
    name = param.partition("[")[0]
    return RequestError(
        "context_length_exceeded",
        # clients know this error by OpenAI's words, which the first two sentences keep
        f"This model's maximum context length is {limit} tokens. However, your {name} resulted "
        f"in {count} tokens. Please reduce the length of the {name} to {longest} tokens.",
        param,
        {"n_prompt_tokens": num_tokens, "n_ctx": limit},
    ).noting(prompt_tokens=num_tokens, limit=longest)


def check_can_go_on(
    fingerprint: str, then: ServedForm, num_tokens: int, model: ServedModel
) -> int | None:
    """The context if it is smaller than the one that the stream began with, else None.

    RequestError `model_changed` if this model cannot go on with a stream that began on the one of
    that fingerprint and form. `num_tokens` are those of its longest unfinished choice, prompt and
    answer so far.
    """
    now = model.form
    if fingerprint != model.system_fingerprint:
        raise RequestError(
            "model_changed", f"{_what_changed(then, now)} Send the request again to run it anew."
        )
    is_smaller = now.max_model_len < then.max_model_len
    if num_tokens + is_smaller > now.max_model_len:
        raise RequestError(
            "model_changed",
            f"The context is now {now.max_model_len} tokens, and this stream had {num_tokens} "
            "when it was resumed; send a shorter request, or raise --max-model-len.",
        )
    return now.max_model_len if is_smaller else None


def _what_changed(then: ServedForm, now: ServedForm) -> str:
    if not then.version:
        return "The server now runs other weights, or the same ones with other settings."
    changes = [
        f"{new} instead of {old}"
        for old, new in (
            (then.dtype, now.dtype),
            (then.device, now.device),
            (f"Headrace {then.version}", f"Headrace {now.version}"),
        )
        if old != new
    ]
    return f"The server now runs {', '.join(changes) or 'other weights'}."
