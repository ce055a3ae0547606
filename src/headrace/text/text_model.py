"""The text side of a model: names, tokenizer, chat template and formats; needs no engine."""

from pathlib import Path

from headrace.text.encoder import Encoder
from headrace.text.model_names import names_of, paths_of, root_of
from headrace.text.output_splitter import reasoning_format
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats.table import tool_format
from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.hub import OnProgress
from headrace_common.checkpoints.sentences import read_sentences
from headrace_common.checkpoints.small_file import unreadable_refused
from headrace_common.checkpoints.spec import SEEING, ModelSpec, read_spec
from headrace_common.config.settings import ModelConfig

_UNKNOWN = 1 << 30  # tokens; where no limit is known, none is checked


class TextModel:
    """Everything that turns prompts into token ids, and token ids into answers."""

    @unreadable_refused()
    def __init__(
        self,
        config: ModelConfig,
        on_progress: OnProgress | None = None,
        folder: Path | None = None,
    ) -> None:
        """Read the model in `folder`; without a folder, find the model, or download it."""
        self.folder = folder or find_model(config.model, config.revision, on_progress)
        self.root = root_of(config)
        self.names = names_of(config)  # the server itself uses the first
        self.paths = paths_of(config)
        self.spec: ModelSpec = read_spec(self.folder)
        self.has_source = self.spec.has_source  # its answers have a context of their own
        self.sentences = read_sentences(self.spec)
        self.tokenizer = Tokenizer.load(self.folder, self.sentences.lowers_case)
        self.encoder = Encoder(self.tokenizer)
        self.template = ChatTemplate.load(
            self.folder, self.tokenizer.special_tokens, config.chat_template
        )
        source = self.template.source if self.template else ""
        # formats of the model's tool calls and reasoning; "" if it has none
        tools_source = self.template.tools_source if self.template else ""
        self.tool_format = _given(config.tool_format, tool_format(tools_source))
        self.reasoning_format = _given(config.reasoning_format, reasoning_format(source))
        breaks = config.special_tokens_in_text == "escape"
        self.broken_texts = self.tokenizer.special_texts if breaks else ()
        self._lane = config.lane
        self._max_model_len = config.max_model_len
        self.pooling = config.pooling
        self.cuts_any = config.embedding_dimensions == "any"  # vectors may be cut to any length
        self.defaults = self.spec.defaults if config.generation_config == "auto" else None

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
        """The most tokens of prompt and answer together; 0 if settings and model set no limit."""
        return min(filter(None, (self._max_model_len, self.spec.max_positions)), default=0)


def longest_prompt(model: TextModel, max_model_len: int, max_tokens: int | None) -> int:
    """Return the tokens of the longest prompt that can be answered with `max_tokens`."""
    if not max_model_len:
        return _UNKNOWN  # the engine knows the limit
    if model.has_source:
        return max_model_len  # the answer has a context of its own
    return max_model_len - (max_tokens != 0)


def _given(setting: str, found: str) -> str:
    return {"auto": found, "none": ""}.get(setting, setting)
