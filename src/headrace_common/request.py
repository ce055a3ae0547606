"""Defines a request after parsing, before any text is rendered."""

from typing import Any

import msgspec

from headrace_common.sampling import Sampling

Route = str
"""The path of the route that received a request. It determines the format of request and answer."""


MAX_IMAGE_BYTES = 20 << 20


class Chat(msgspec.Struct, frozen=True, tag=True):
    """The messages of a chat in the form that the chat template receives."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    images: tuple[bytes, ...] = ()  # data of each image, in the client's order
    image_params: tuple[str, ...] = ()  # paths of the images' fields in the body
    # The URL of each image, or "" for an image in the body. Empty if all images are in the body.
    addresses: tuple[str, ...] = ()
    # The number of images in a stub (a chat without its content).
    num_images: int = 0


class Text(msgspec.Struct, frozen=True, tag=True):
    """A prompt as text. With `add_special_tokens`, the tokenizer adds special tokens."""

    text: str
    add_special_tokens: bool = True


class Infill(msgspec.Struct, frozen=True, tag=True):
    """The texts before and after the gap to fill, and additional files as pairs (name, text)."""

    before: str
    behind: str
    files: tuple[tuple[str, str], ...] = ()
    add_special_tokens: bool = True


class Ids(msgspec.Struct, frozen=True, tag=True):
    """A prompt as token ids, which are used unchanged."""

    token_ids: tuple[int, ...]


Prompt = Chat | Text | Infill | Ids


class ResponseOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the client wants the answer written. These options never change the generated tokens."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    # Whether progress is reported as words in the reasoning channel.
    progress_in_words: bool = False
    # Whether chunks that only report progress have an empty list of choices, as in llama.cpp.
    progress_as_llama_cpp: bool = False
    return_ingestion: bool = False
    # Whether heartbeats are sent while no other data is sent.
    heartbeat: bool = False
    # Seconds without data until the server sends a comment. -1: never. None: the server's setting.
    ping_interval_s: int | None = None
    # If `stream` is false, answer immediately with the current state.
    background: bool = False


class Channels(msgspec.Struct, frozen=True, omit_defaults=True):
    """The formats that divide an answer into content, reasoning and tool calls."""

    tools: str = ""  # a tool format; "": no tools
    reasoning: str = ""  # a reasoning format; "": all text is content
    # The JSON types of the parameters that can be strings, by tool and parameter.
    parameter_types: dict[str, dict[str, tuple[str, ...]]] = {}
    # Tools that take free text. The model sees each such tool as a function of `input`.
    custom_tools: tuple[str, ...] = ()
    toolsets: dict[str, str] = {}  # the toolset of each tool, by the tool's name in the prompt


BACKGROUND = 1_000_000
"""The priority of background requests, which run only while no others run.

Clients cannot ask for this priority.
"""


class Request(msgspec.Struct, frozen=True):
    """A generation request with n choices for each prompt.

    Choices are numbered prompt by prompt.
    """

    route: Route
    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # whether the text keeps a matched stop string
    skip_special_tokens: bool = True
    echo: bool = False  # whether the text starts with the prompt
    priority: int = 0
    cache_prompt: bool = True
    cache_salt: str = ""
    # Stored requests contain this field under the name `wire`.
    response_options: ResponseOptions = msgspec.field(name="wire", default=ResponseOptions())
    channels: Channels | None = None  # None: all text is content
    kept: bytes = b""  # data that the dialect stores with the request
    # The name that the client used for the model, if the name is an alias; else "".
    alias: str = ""

    @property
    def is_background(self) -> bool:
        """Whether the request runs only while no other requests run."""
        return self.priority >= BACKGROUND

    @property
    def shown_model(self) -> str:
        """The model's name in the answer, which is the name that the client sent."""
        return self.alias or self.model

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n
