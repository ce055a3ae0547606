"""A model that a server serves: its text side, and what its engine said of it."""

import itertools
import re
import time
from pathlib import Path

from headrace.streams.record import ServedSetup
from headrace.text.model_names import adapters_of
from headrace.text.text_model import TextModel
from headrace_common.adapter import Adapter
from headrace_common.checkpoints.adapters import name_adapter
from headrace_common.checkpoints.hub import OnProgress
from headrace_common.config.settings import ModelConfig
from headrace_common.messages import Ready
from headrace_common.version import __version__

_EMBEDS = re.compile(r"((?<!LMHead)Model|ForMaskedLM)$")  # architectures that only embed


class ServedModel(TextModel):
    """One model. `ready` holds the engine's limits once it has loaded."""

    _numbers = itertools.count()

    def __init__(
        self,
        config: ModelConfig,
        on_progress: OnProgress | None = None,
        folder: Path | None = None,
        num_parameters: int | None = None,
    ) -> None:
        """Read the text side; `num_parameters` is what the model's files state, if it is known."""
        super().__init__(config, on_progress, folder)
        self.number = next(self._numbers)  # a model that is read anew is another one
        self.own_names = self.names
        self.adapters: dict[str, Adapter] = {}  # by name; those that are served now
        self.created = int(time.time())
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
    def max_model_len(self) -> int:
        """Longest prompt and answer together: the engine's limit once it has loaded."""
        return self.ready.max_model_len if self.ready else super().max_model_len

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
