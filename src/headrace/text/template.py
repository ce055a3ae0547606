"""A model's chat template: messages to the text that is tokenized; never tokenizes."""

import os
import secrets
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from headrace.text.sandbox import TemplateEnvironment
from headrace.text.sandbox_sizes import Overrun
from headrace_common.checkpoints.small_file import read_small
from headrace_common.errors import OVERRAN, ModelError, RequestError
from headrace_common.request import Chat

_MAX_WORDS = 1000
_MAX_REASON = 300  # characters of what is wrong with a template
_WORDS = "The sluice is open."  # a sign of the system's text in a prompt
_USER = {"role": "user", "content": "Hi"}
_ASSISTANT = {"role": "assistant", "content": "Hello"}

Message = dict[str, Any]


class TemplateRefused(RequestError):
    """The template raised an error: it may take the same conversation in another form."""


class _Named(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """The part of a tokenizer's config that matters here."""

    chat_template: str | list[_Named] | None = None


class ChatTemplate:
    """Thread-safe. `sources` has the template as "default", or others by name beside it.

    `special_tokens` (`bos_token`, `eos_token` …) are variables of the template. Rendering may
    take seconds if the template is hostile: call it in a worker thread.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], file: str = ""
    ) -> None:
        self._file = file  # that the sources are from, for errors
        self._environment = TemplateEnvironment()
        self.source = sources.get("default") or next(iter(sources.values()))
        self._special_tokens = dict(special_tokens)
        self._default = self._compile(self.source)
        self.tools_source = sources.get("tool_use", self.source)
        self._tools = self._compile(self.tools_source)

    @classmethod
    def load(
        cls, folder: Path, special_tokens: Mapping[str, str], given: str | None = None
    ) -> "ChatTemplate | None":
        """Load the template of the model's folder; None if it has none.

        A template that is `given`, as the path of a file or as text, takes precedence.
        """
        if not given:
            sources = _sources(folder)
            return cls(sources, special_tokens, _file_of(folder)) if sources else None
        if os.path.isfile(given):
            file = Path(given)
            return cls({"default": _read(file)}, special_tokens, file.name)
        if "\n" not in given and "{" not in given:
            raise ModelError(f"No chat template at {given}; give the path of a file.")
        return cls({"default": given}, special_tokens, "--chat-template")

    def render(self, chat: Chat) -> str:
        """The prompt's text; RequestError `template_failed` with the template's own words."""
        messages = [for_template(message) for message in chat.messages]
        if not chat.continue_final_message:
            return self._run(chat, messages)
        mark = f"continued{secrets.token_hex(16)}"
        _append_to_content(messages[-1], mark)
        text, found, _ = self._run(chat, messages).rpartition(mark)
        if not found:
            raise RequestError(
                "template_failed",
                "The last message cannot be continued: the chat template does not render it.",
                "messages",
            )
        return text.replace(mark, "")

    @cached_property
    def shows_system(self) -> bool | None:
        """Whether a first system message appears in the prompt; None if the template refuses it."""
        return self._shows({"role": "system", "content": _WORDS}, _USER)

    @cached_property
    def shows_later_system(self) -> bool | None:
        """Whether a later system message appears in the prompt; None if the template refuses it."""
        return self._shows(_USER, _ASSISTANT, {"role": "system", "content": _WORDS}, _USER)

    def _shows(self, *messages: Message) -> bool | None:
        try:
            return _WORDS in self.render(Chat(messages))
        except RequestError:
            return None

    def _run(self, chat: Chat, messages: list[Message]) -> str:
        template = self._tools if chat.tools else self._default
        variables = (
            self._special_tokens
            | chat.template_kwargs
            | {
                "messages": messages,
                "tools": list(chat.tools) or None,
                "add_generation_prompt": chat.add_generation_prompt,
            }
        )
        try:
            text = self._environment.render(template, variables)
            text.encode()
            return text
        except UnicodeEncodeError:
            raise _failed("The chat template renders half a surrogate pair.") from None
        except Overrun as error:
            raise _failed(f"{OVERRAN}: it {error}.") from None
        except jinja2.TemplateError as error:
            words = error.message or "The chat template refused the messages."
            raise _failed(words, TemplateRefused) from error
        except (MemoryError, OverflowError, RecursionError) as error:
            raise _failed(f"{OVERRAN}: it nests or grows without end.") from error
        except Exception as error:  # a template runs on whatever the messages hold
            words = "The chat template cannot render these messages."
            raise _failed(words, TemplateRefused) from error

    def _compile(self, source: str) -> jinja2.Template:
        """Compile a template; ModelError says in one sentence what is wrong with it."""
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            why = f"{_shortened(error.message or '')} (line {error.lineno})"
        except jinja2.TemplateError as error:
            why = _shortened(error.message or "")
        except (MemoryError, RecursionError, OverflowError, SyntaxError):
            why = "it nests too deeply"
        except ValueError:
            why = "it has a number of too many digits"
        where = f" in {self._file}" if self._file else ""
        raise ModelError(
            f"The chat template{where} is not valid: {why}; correct it, or "
            "give another with --chat-template.",
            "tokenizer_invalid",
        )


def _shortened(words: str) -> str:
    return " ".join(words[:_MAX_REASON].split())


def _failed(message: str, kind: type[RequestError] = RequestError) -> RequestError:
    """A template's own words may be long, and no text at all."""
    words = message[:_MAX_WORDS].encode(errors="replace").decode()
    return kind("template_failed", words, "messages")


def for_template(message: Message) -> Message:
    """A copy: developer is system to a template, arguments of tool calls are parsed."""
    message = dict(message)
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return message


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (ValueError, RecursionError):  # a model wrote it; the template shows it as it is
        return call
    return call | {"function": function | {"arguments": arguments}}


def _append_to_content(message: Message, mark: str) -> None:
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [dict(part) for part in content]
        texts = [part for part in parts if isinstance(part.get("text"), str)]
        if texts:
            texts[-1]["text"] += mark
        message["content"] = parts
    else:
        message["content"] = (content or "") + mark


def _sources(folder: Path) -> dict[str, str]:
    sources = _config_sources(folder)
    if (folder / "chat_template.jinja").exists():
        sources["default"] = _read(folder / "chat_template.jinja")
    for named in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[named.stem] = _read(named)
    return sources


def _file_of(folder: Path) -> str:
    """The file that holds the template, in words."""
    if (of_gguf := next(folder.glob("*.gguf"), None)) is not None:
        return of_gguf.name
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return (
        f"{next((name for name in names if (folder / name).exists()), 'a file')} of {folder.name}"
    )


def _config_sources(folder: Path) -> dict[str, str]:
    """`chat_template` in a config: one text, or a list of {name, template}."""
    sources: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _stated(folder / name).chat_template if (folder / name).exists() else None
        if isinstance(found, str):
            sources["default"] = found
        elif found:
            sources |= {named.name: named.template for named in found}
    return sources


def _stated(file: Path) -> _Config:
    try:
        return msgspec.json.decode(_read(file), type=_Config)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"The chat_template in {file.name} is neither a text nor a list of named ones.",
            "tokenizer_invalid",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file.name} is not valid JSON.", "tokenizer_invalid") from error


def _read(file: Path) -> str:
    try:
        return read_small(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        message = f"The chat template in {file.name} cannot be read; it must be UTF-8."
        raise ModelError(message, "tokenizer_invalid") from error
