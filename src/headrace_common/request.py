"""The request, after parsing and before any text is rendered; frozen."""

from typing import Any

import msgspec

from headrace_common.sampling import Sampling

Route = str
"""The path that a request came by, which names its dialect."""


MAX_IMAGE_BYTES = 20 << 20


class Chat(msgspec.Struct, frozen=True, tag=True):
    """Messages for the chat template, as the template will see them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    images: tuple[bytes, ...] = ()  # as they were sent, in the order of their parts
    image_params: tuple[str, ...] = ()  # the paths of those
    addresses: tuple[str, ...] = ()  # of each, or "" if it came along; none if all did
    num_images: int = 0  # that a stub stands for


class Text(msgspec.Struct, frozen=True, tag=True):
    """A prompt as text; the tokenizer's own special tokens are added if asked."""

    text: str
    add_special_tokens: bool = True


class Infill(msgspec.Struct, frozen=True, tag=True):
    """The texts on both sides of what is generated, and files beside them: names and texts."""

    before: str
    behind: str
    files: tuple[tuple[str, str], ...] = ()
    add_special_tokens: bool = True


class Ids(msgspec.Struct, frozen=True, tag=True):
    """A prompt as token ids, used as they are."""

    token_ids: tuple[int, ...]


Prompt = Chat | Text | Infill | Ids


class ResponseOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How this client wants its answer written; never changes what is generated."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    progress_in_words: bool = False  # where reasoning would stand, too
    return_ingestion: bool = False
    heartbeat: bool = False  # life is shown while nothing is to be said
    ping_interval_s: int | None = None  # silence until a comment; -1: never; None: as served
    background: bool = False  # without stream, answered at once with what there is


class Channels(msgspec.Struct, frozen=True, omit_defaults=True):
    """The formats by which an answer is split into content, reasoning and tool calls."""

    tools: str = ""  # a tool format; "": there are no tools
    reasoning: str = ""  # a reasoning format; "": all text is content
    text_parameters: dict[str, tuple[str, ...]] = {}  # those declared as strings, by tool
    custom_tools: tuple[str, ...] = ()  # tools that take free text, shown as functions of `input`


BACKGROUND = 1_000_000
"""The priority of what takes only what others leave; no client may ask for it by number."""


class Request(msgspec.Struct, frozen=True):
    """One generation request. Its prompts times n are its choices, numbered in that order."""

    route: Route
    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # a matched stop string stays in the text
    skip_special_tokens: bool = True
    echo: bool = False  # the text begins with the prompt
    priority: int = 0
    cache_prompt: bool = True
    cache_salt: str = ""
    # named wire where requests are stored
    response_options: ResponseOptions = msgspec.field(name="wire", default=ResponseOptions())
    channels: Channels | None = None  # None: all text is content
    kept: bytes = b""  # what its dialect needs of the body later, in the dialect's own form
    alias: str = ""  # by which the client asked for the model, if it is not the model's own name

    @property
    def is_background(self) -> bool:
        """Whether it takes only what others leave."""
        return self.priority >= BACKGROUND

    @property
    def shown_model(self) -> str:
        """The name of the model in the answer: the one that the client sent."""
        return self.alias or self.model

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n
