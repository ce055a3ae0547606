"""Holds a served model: its tokenizer and formats, its adapters and its engine's limits."""

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

# Names of architectures that can only compute embeddings.
_EMBEDS = re.compile(r"((?<!LMHead)Model|ForMaskedLM)$")


class ServedModel(TextModel):
    """A model that a server serves. `ready` has the engine's limits once the engine has loaded."""

    _numbers = itertools.count()

    def __init__(
        self,
        config: ModelConfig,
        on_progress: OnProgress | None = None,
        folder: Path | None = None,
        num_parameters: int | None = None,
    ) -> None:
        """Read the model except its weights; `num_parameters` is the number of weights."""
        super().__init__(config, on_progress, folder)
        # A model that is read again gets a new number.
        self.number = next(self._numbers)
        self.own_names = self.names
        # The adapters that are served now, by name.
        self.adapters: dict[str, Adapter] = {}
        self.created = int(time.time())
        self.ready: Ready | None = None
        # How the engine runs the model. Both are empty until the engine has loaded.
        self.setup = ServedSetup()
        self.system_fingerprint = ""
        self._num_parameters = num_parameters

    def came_up(self, ready: Ready) -> None:
        """Store the limits and the setup of the engine that runs the model now."""
        self.ready = ready
        device = f"{ready.device} with kernels {ready.kernels}"
        self.setup = ServedSetup(__version__, _stored_as(ready), device, ready.max_model_len)
        self.system_fingerprint = f"fp_{ready.fingerprint}"

    def read_adapters(self, config: ModelConfig) -> None:
        """Read the adapters in the settings; raise ModelError if an adapter does not fit."""
        for name, path in adapters_of(config).items():
            self.add_adapter(name_adapter(name, Path(path), self.spec.architecture, self.names[0]))

    def add_adapter(self, adapter: Adapter) -> None:
        """Serve an adapter, so that requests can name the adapter."""
        self.adapters[adapter.name] = adapter
        self.names = (*self.own_names, *self.adapters)

    def remove_adapter(self, name: str) -> Adapter | None:
        """Stop serving an adapter; return None if no adapter has this name."""
        adapter = self.adapters.pop(name, None)
        self.names = (*self.own_names, *self.adapters)
        return adapter

    @property
    def load_notes(self) -> list[str]:
        """Sentences for the operator, once the model has loaded."""
        found = (self._short_context, self._sampling_summary, self._unused_vision)
        return [it for it in found if it]

    @property
    def _short_context(self) -> str:
        """A sentence if the context is shorter than --max-model-len; else ""."""
        name, asked, longest = self.names[0], self._max_model_len, self.max_model_len
        if asked is None or asked <= longest:
            return ""
        if longest == self.spec.max_positions or (self.ready and self.ready.is_whole):
            return f"{name} takes at most {longest:,} tokens; --max-model-len {asked} has no effect"
        return (
            f"{name} has memory for {longest:,} tokens, but --max-model-len is {asked}; "
            "raise --kv-cache-memory-bytes"
        )

    @property
    def _sampling_summary(self) -> str:
        """A sentence with the sampling defaults of a GGUF model; "" if the model has no
        defaults.
        """
        shown = self.spec.is_gguf and self.defaults
        if not shown:
            return ""
        of_each = [(name, getattr(shown, name)) for name in shown.__struct_fields__]
        values = ", ".join(f"{name} {value:g}" for name, value in of_each if value is not None)
        return f"{self.names[0]} samples with {values} unless a request sets other values"

    @property
    def _unused_vision(self) -> str:
        """A sentence if the vision part of a GGUF model cannot be used; else ""."""
        reason = str(self.spec.config.get("mmproj_unused", "")).rstrip(".")
        return f"{self.names[0]} reads no images: {reason}" if reason else ""

    @property
    def num_parameters(self) -> int | None:
        """The number of weights.

        The engine counts the weights. Before the engine has loaded, this is the number in the
        model's files.
        """
        return self.ready.num_parameters if self.ready else self._num_parameters

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the model supports: generate, embed, score.

        The value is a guess until the model has loaded.
        """
        if self.ready:
            return self.ready.tasks
        if self.spec.architecture.endswith("ForSequenceClassification"):
            return ("score",)
        return ("embed",) if _EMBEDS.search(self.spec.architecture) else ("generate", "embed")

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens in prompt and answer together.

        After the load, this is the engine's limit.
        """
        return self.ready.max_model_len if self.ready else super().max_model_len


def _stored_as(ready: Ready) -> str:
    """Describe the number formats of a model's weights and cache."""
    weights = ready.dtype if ready.quantize == "none" else f"{ready.dtype} {ready.quantize}"
    kv = ready.kv_cache_dtype
    return weights if kv == "auto" else f"{weights} with a cache in {kv}"
