"""The models a server serves, as the gateway's process knows them: names, text, limits."""

import time
from pathlib import Path

import msgspec

from headrace import __version__
from headrace.checkpoints.find import find_model
from headrace.checkpoints.hub import OnProgress
from headrace.checkpoints.spec import ModelSpec, read_spec
from headrace.core.config import ModelConfig
from headrace.core.errors import ModelError, RequestError
from headrace.core.messages import Ready
from headrace.core.request import Chat, Ids, Request
from headrace.generation.work import Work
from headrace.streams.record import Record, ServedForm
from headrace.text.channels import reasoning_format
from headrace.text.encoder import Encoder
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import tool_format

_PROMPT_FIELDS = {"/v1/responses": "input"}  # where it has another name than usual
_SHOWN = 100  # characters of an unknown name

_ids_of = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


class ServedModel:
    """One model. `ready` holds the engine's limits once it has loaded."""

    def __init__(self, config: ModelConfig, on_progress: OnProgress | None = None) -> None:
        self.folder: Path = find_model(config.model, config.revision, on_progress)
        self.root = self.folder.name if Path(config.model).is_dir() else config.model
        self.names = config.served_model_name or (self.root,)
        self.created = int(time.time())
        self.spec: ModelSpec = read_spec(self.folder)
        self.tokenizer = Tokenizer.load(self.folder)
        self.encoder = Encoder(self.tokenizer)
        self.template = self._load_template(config.chat_template)
        source = self.template.source if self.template else ""
        # by which the model writes tool calls and sets its reasoning apart; "" if it does not
        self.tool_format = _given(config.tool_format, tool_format(source))
        self.reasoning_format = _given(config.reasoning_format, reasoning_format(source))
        self.defaults = self.spec.defaults if config.generation_config == "auto" else None
        self.ready: Ready | None = None
        self._quantization = "" if config.quantize == "none" else f" {config.quantize}"

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens; the model's own until the engine says."""
        return self.ready.max_model_len if self.ready else self.spec.max_positions or 0

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
            ready.dtype + self._quantization,
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


class Models:
    """Every served name; one model now."""

    def __init__(self, models: tuple[ServedModel, ...]) -> None:
        self._models = models

    def all(self) -> tuple[ServedModel, ...]:
        return self._models

    def get(self, name: str | None) -> ServedModel:
        """The model that answers to `name`; without a name, the first one."""
        if name is None:
            return self._models[0]
        for model in self._models:
            if name in model.names:
                return model
        served = ", ".join(name for model in self._models for name in model.names)
        raise RequestError(
            "model_not_found",
            f"No model {name[:_SHOWN]!r} is served here; there is: {served}.",
            "model",
        )


async def admit(
    work: Work, model: ServedModel, request: Request, packed: bytes
) -> tuple[bytes, ...]:
    """Packed int32 ids of each of the `packed` prompts; RequestError if one cannot be served."""
    longest = model.max_model_len - (request.sampling.max_tokens != 0)
    encoded = _ids_of(await work.do("prompts", [packed], longest))
    for number, token_ids in enumerate(encoded):
        _check_length(model, request, number, len(token_ids) // 4, longest)
    return encoded


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
        raise RequestError(
            "context_length_exceeded",
            # clients know this error by OpenAI's words, which the first two sentences keep
            f"This model's maximum context length is {limit} tokens. However, your {name} resulted "
            f"in {count} tokens. Please reduce the length of the {name} to {longest} tokens.",
            param,
            {"n_prompt_tokens": num_tokens, "n_ctx": limit},
        )


def check_can_go_on(record: Record, num_tokens: int, model: ServedModel) -> int | None:
    """The context if it is smaller than the one that the stream began with, else None.

    RequestError `model_changed` if this model cannot go on with the stream. `num_tokens` are those
    of its longest unfinished choice, prompt and answer so far.
    """
    then, now = record.served, model.form
    if record.system_fingerprint != model.system_fingerprint:
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
