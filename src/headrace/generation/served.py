"""The models a server serves, as the gateway's process knows them: names, text, limits."""

import time
from pathlib import Path

from headrace.core.config import ModelConfig
from headrace.core.errors import ModelError, RequestError
from headrace.core.messages import Ready
from headrace.models.find import find_model
from headrace.models.hub import OnProgress
from headrace.models.spec import ModelSpec, read_spec
from headrace.text.encoder import Encoder
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


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
        self.defaults = self.spec.defaults if config.generation_config == "auto" else None
        self.ready: Ready | None = None

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

    def _load_template(self, name: str | None) -> ChatTemplate | None:
        file = Path(name) if name else None
        if file and not file.is_file():
            raise ModelError(f"No chat template at {name}; give the path of a file.")
        return ChatTemplate.load(self.folder, self.tokenizer.special_tokens, file)


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
            "model_not_found", f"No model {name!r} is served here; there is: {served}.", "model"
        )
