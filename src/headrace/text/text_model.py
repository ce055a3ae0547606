"""Holds the text side of a model: names, tokenizer, chat template and formats. Needs no engine."""

from pathlib import Path

from headrace.text.encoder import Encoder
from headrace.text.model_names import names_of, paths_of, root_of
from headrace.text.output_splitter import reasoning_format
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats.table import tool_format
from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.hub import OnProgress
from headrace_common.checkpoints.sentence_transformers import read_sentences
from headrace_common.checkpoints.small_file import unreadable_refused
from headrace_common.checkpoints.spec import SEEING, ModelSpec, read_spec
from headrace_common.config.settings import ModelConfig

# Used as a prompt's token limit if the real limit is unknown; larger than any prompt.
_UNKNOWN = 1 << 30


class TextModel:
    """Everything that turns prompts into token ids, and token ids into answers."""

    @unreadable_refused()
    def __init__(
        self,
        config: ModelConfig,
        on_progress: OnProgress | None = None,
        folder: Path | None = None,
    ) -> None:
        """Read the model in `folder`; without a folder, find or download the model."""
        self.folder = folder or find_model(
            config.model, config.revision, on_progress, config.mmproj
        )
        self.root = root_of(config)
        # The server itself uses the first name.
        self.names = names_of(config)
        self.paths = paths_of(config)
        self.spec: ModelSpec = read_spec(self.folder)
        self.vocab_size = self.spec.vocab_size
        # True for an encoder-decoder model, in which answers have a separate context.
        self.has_source = self.spec.has_source
        self.sentences = read_sentences(self.spec)
        self.tokenizer = Tokenizer.load(self.folder, self.sentences.lowers_case)
        self.encoder = Encoder(self.tokenizer)
        self.template = ChatTemplate.load(
            self.folder, self.tokenizer.special_tokens, config.chat_template
        )
        source = self.template.source if self.template else ""
        # Formats of the model's tool calls and reasoning; "" if the model has no such format.
        tools_source = self.template.tools_source if self.template else ""
        self.tool_format = _given(config.tool_format, tool_format(tools_source))
        self.reasoning_format = _given(config.reasoning_format, reasoning_format(source))
        breaks = config.special_tokens_in_text == "escape"
        self.prefills_assistant = config.prefill_assistant
        self.broken_texts = self.tokenizer.special_texts if breaks else ()
        self._lane = config.lane
        self._max_model_len = config.max_model_len
        self.pooling = config.pooling
        # True if embeddings may be truncated to any length.
        self.cuts_any = config.embedding_dimensions == "any"
        self.defaults = self.spec.defaults if config.generation_config == "auto" else None

    @property
    def has_vision(self) -> bool:
        """Whether the model accepts images; False if the lane (the way to run the model) is text
        only.
        """
        sees = "vision_config" in self.spec.config and self.spec.has_processor
        return sees and not self._lane.endswith("-text") and self._lane != "llama-cpp"

    @property
    def has_native_vision(self) -> bool:
        """Whether images are encoded one vision layer at a time; only native lanes do so."""
        return self.spec.architecture in SEEING and self._lane in ("auto", "native-multimodal")

    @property
    def embeds_units(self) -> bool:
        """Whether embeddings are normalized to length 1."""
        return self.pooling != "auto" or self.sentences.are_units

    @property
    def max_model_len(self) -> int:
        """The maximum number of prompt and answer tokens together; 0 if there is no known limit."""
        return min(filter(None, (self._max_model_len, self.spec.max_positions)), default=0)


def longest_prompt(model: TextModel, max_model_len: int, max_tokens: int | None) -> int:
    """Return the longest prompt in tokens; one answer token must fit unless `max_tokens` is 0."""
    if not max_model_len:
        # Only the engine knows the limit.
        return _UNKNOWN
    if model.has_source:
        # The answer has a separate context.
        return max_model_len
    return max_model_len - (max_tokens != 0)


def _given(setting: str, found: str) -> str:
    return {"auto": found, "none": ""}.get(setting, setting)
