"""The models a server serves, as the gateway's process knows them: names, text, limits."""

import itertools
import re
import time
from pathlib import Path
from typing import Generic, TypeVar

from headrace.fleet.model_names import (
    LATEST,
    Aliases,
    Named,
    adapters_of,
    names_of,
    paths_of,
    root_of,
)
from headrace.streams.record import ServedSetup
from headrace.text.encoder import Encoder
from headrace.text.output_splitter import reasoning_format
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats.table import tool_format
from headrace_common.adapter import Adapter
from headrace_common.checkpoints.adapters import name_adapter
from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.hub import OnProgress
from headrace_common.checkpoints.sentences import read_sentences
from headrace_common.checkpoints.small_file import unreadable_refused
from headrace_common.checkpoints.spec import SEEING, ModelSpec, read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.messages import Ready
from headrace_common.version import __version__

_EMBEDS = re.compile(r"((?<!LMHead)Model|ForMaskedLM)$")  # architectures that only embed
_SHOWN = 100  # characters of an unknown name


class ServedModel:
    """One model. `ready` holds the engine's limits once it has loaded."""

    _numbers = itertools.count()

    @unreadable_refused()
    def __init__(
        self,
        config: ModelConfig,
        on_progress: OnProgress | None = None,
        folder: Path | None = None,
        num_parameters: int | None = None,
    ) -> None:
        """Read the model in `folder`, or find it first, which may be a download.

        `num_parameters` is what its files state, if that is known.
        """
        self.folder = folder or find_model(config.model, config.revision, on_progress)
        self.number = next(self._numbers)  # a model that is read anew is another one
        self.root = root_of(config)
        self.own_names = self.names = names_of(config)
        self.adapters: dict[str, Adapter] = {}  # by name; those that are served now
        self.paths = paths_of(config)
        self.created = int(time.time())
        self.spec: ModelSpec = read_spec(self.folder)
        self.has_source = self.spec.has_source  # its answers have a context of their own
        self.sentences = read_sentences(self.spec)
        self.tokenizer = Tokenizer.load(self.folder, self.sentences.lowers_case)
        self.encoder = Encoder(self.tokenizer)
        self.template = ChatTemplate.load(
            self.folder, self.tokenizer.special_tokens, config.chat_template
        )
        source = self.template.source if self.template else ""
        # by which the model writes tool calls and sets its reasoning apart; "" if it does not
        tools_source = self.template.tools_source if self.template else ""
        self.tool_format = _given(config.tool_format, tool_format(tools_source))
        self.reasoning_format = _given(config.reasoning_format, reasoning_format(source))
        breaks = config.special_tokens_in_text == "escape"
        self.broken_texts = self.tokenizer.special_texts if breaks else ()
        self._lane = config.lane
        self._max_model_len = config.max_model_len
        self.pooling = config.pooling
        self.cuts_any = config.embedding_dimensions == "any"  # vectors, to any length
        self.defaults = self.spec.defaults if config.generation_config == "auto" else None
        self.ready: Ready | None = None
        self._num_parameters = num_parameters

    def read_adapters(self, config: ModelConfig) -> None:
        """Read the adapters that the settings name; ModelError if one does not fit the model."""
        for name, path in adapters_of(config).items():
            self.add_adapter(name_adapter(name, Path(path), self.spec.architecture, self.names[0]))

    def add_adapter(self, adapter: Adapter) -> None:
        """Let requests ask for an adapter by its name."""
        self.adapters[adapter.name] = adapter
        self.names = (*self.own_names, *self.adapters)

    def remove_adapter(self, name: str) -> Adapter | None:
        """Serve an adapter no more; None if there is none of that name."""
        adapter = self.adapters.pop(name, None)
        self.names = (*self.own_names, *self.adapters)
        return adapter

    @property
    def sampling_words(self) -> str:
        """The model's defaults of sampling, for people; "" if it has none of its own."""
        shown = self.spec.is_gguf and self.defaults
        if not shown:
            return ""
        of_each = [(name, getattr(shown, name)) for name in shown.__struct_fields__]
        values = ", ".join(f"{name} {value:g}" for name, value in of_each if value is not None)
        return f"{self.names[0]} draws by {values} unless a request says otherwise"

    @property
    def num_parameters(self) -> int | None:
        """Number of its weights; until an engine has counted them, as its files state."""
        return self.ready.num_parameters if self.ready else self._num_parameters

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks it can do (generate, embed, score); until it has loaded, by its architecture."""
        if self.ready:
            return self.ready.tasks
        if self.spec.architecture.endswith("ForSequenceClassification"):
            return ("score",)
        return ("embed",) if _EMBEDS.search(self.spec.architecture) else ("generate", "embed")

    @property
    def has_vision(self) -> bool:
        """Whether the model sees images; a lane of text alone leaves the vision side out."""
        sees = "vision_config" in self.spec.config and self.spec.has_processor
        return sees and not self._lane.endswith("-text")

    @property
    def has_native_vision(self) -> bool:
        """Whether it sees images in pieces, beside our own implementation of its text side."""
        return self.spec.architecture in SEEING and self._lane in ("auto", "native-multimodal")

    @property
    def embeds_units(self) -> bool:
        """Whether vectors have length 1."""
        return self.pooling != "auto" or self.sentences.are_units

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
    def setup(self) -> ServedSetup:
        ready = self.ready
        if ready is None:
            return ServedSetup()
        return ServedSetup(
            __version__,
            ready.dtype if ready.quantize == "none" else f"{ready.dtype} {ready.quantize}",
            f"{ready.device} with kernels {ready.kernels}",
            ready.max_model_len,
        )


def _given(setting: str, found: str) -> str:
    return {"auto": found, "none": ""}.get(setting, setting)


ByName = TypeVar("ByName", bound=Named)


class Models(Generic[ByName]):
    """The served models, by the names that clients ask for."""

    def __init__(self, models: tuple[ByName, ...], aliases: Aliases | None = None) -> None:
        self._models = models
        self._aliases = aliases or Aliases()

    def all(self) -> tuple[ByName, ...]:
        return self._models

    @property
    def first(self) -> ByName:
        """The model that answers where no name is given."""
        return self._models[0]

    def find(self, name: str) -> ByName | None:
        """Return the model of a name, or else of the path that it was given by, if there is one.

        Clients of Ollama may write `:latest` after any name.
        """
        for model in self._models:
            if name in model.names:
                return model
        for model in self._models:
            if name in model.paths:
                return model
        return self.find(name.removesuffix(LATEST)) if name.endswith(LATEST) else None

    def resolve(self, name: str) -> str:
        """Return the name of the model or adapter that a client means by `name`.

        An alias gives the name that it stands for. A path, or a name that nobody has, stays as it
        is.
        """
        if (model := self.find(name)) is not None:
            short = name.removesuffix(LATEST)
            return short if name not in model.names and short in model.names else name
        meant = self._aliases.model(name)
        return name if meant is None or self.find(meant) is None else meant

    def answering(self, name: str) -> ByName | None:
        """Return the model that answers to a name, a path or an alias, if there is one."""
        return self.find(self.resolve(name))

    @property
    def aliases(self) -> dict[str, str]:
        """The aliases without *, each with the name that it stands for."""
        fixed = {name: self.resolve(name) for name in self._aliases.fixed}
        return {name: meant for name, meant in fixed.items() if meant != name}

    def get(self, name: str | None) -> ByName:
        """The model that answers to `name`; without a name, the first one."""
        return self.exact(None if name is None else self.resolve(name))

    def exact(self, name: str | None) -> ByName:
        """Return the model of a name that `resolve` gave; RequestError if it was removed since.

        No alias may take the place of that model.
        """
        if name is None:
            return self.first
        if (model := self.find(name)) is not None:
            return model
        raise self.unknown(name)

    def unknown(self, name: str) -> RequestError:
        """The error for a name that no model has."""
        names = [name for model in self._models for name in model.names]
        served = ", ".join((*names, *self.aliases))
        return RequestError(
            "model_not_found",
            f"No model {name[:_SHOWN]!r} is served here; there is: {served}.",
            "model",
        ).noting(asked=name[:_SHOWN], served=served)
