"""Renders a model's chat template: turns messages into text, but does not tokenize the text."""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from headrace.text.sandbox import TemplateEnvironment
from headrace.text.sandbox_sizes import Overrun
from headrace_common.checkpoints.gguf_vision import MMPROJ
from headrace_common.checkpoints.small_file import read_small
from headrace_common.errors import OVERRAN, ModelError, RequestError
from headrace_common.request import Chat

_MAX_MESSAGE = 1000
_MAX_REASON = 300  # characters of a template's syntax error
# A system message with this text tests whether a template shows system messages.
_PROBE_TEXT = "The sluice is open."
_USER = {"role": "user", "content": "Hi"}
_ASSISTANT = {"role": "assistant", "content": "Hello"}
# How a template reads the tools from the system message.
_SYSTEM_TOOLS = re.compile(r"message\[(['\"])tools\1\]|(['\"])tools\2 in message|message\.tools\b")

Message = dict[str, Any]


class TemplateRefused(RequestError):
    """Raised if the template refuses the messages; it may accept rewritten messages."""


class _Named(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """The part of a tokenizer's config that this module uses."""

    chat_template: str | list[_Named] | None = None


class ChatTemplate:
    """A model's chat template; thread-safe.

    `sources` contains the template under the name "default", or several named templates.
    `special_tokens` (`bos_token`, `eos_token` …) are variables of the template. A hostile template
    can take seconds to render: use a worker thread.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], file: str = ""
    ) -> None:
        # The name of the file that contains the template, for errors.
        self._file = file
        self._environment = TemplateEnvironment()
        self.source = sources.get("default") or next(iter(sources.values()))
        self._special_tokens = dict(special_tokens)
        self._default = self._compile(self.source)
        self.tools_source = sources.get("tool_use", self.source)
        self._tools = self._compile(self.tools_source)
        others, num_reads = _SYSTEM_TOOLS.subn("", self.tools_source)
        # Whether the template reads the tools from the system message, as that of Phi-4-mini does.
        self._has_system_tools = num_reads > 0 and "tools" not in others

    @classmethod
    def load(
        cls, folder: Path, special_tokens: Mapping[str, str], given: str | None = None
    ) -> "ChatTemplate | None":
        """Load the template in the model's folder; return None if the folder has no template.

        If `given` is set, load this template instead. `given` is the path of a template file, or
        the text of a template.
        """
        if not given:
            sources = _sources(folder)
            return cls(sources, special_tokens, _file_of(folder)) if sources else None
        if os.path.isfile(given):
            file = Path(given)
            return cls({"default": _read(file)}, special_tokens, file.name)
        if "\n" not in given and "{" not in given:
            raise ModelError(f"There is no chat template at {given}; give the path of a file.")
        return cls({"default": given}, special_tokens, "--chat-template")

    def render(self, chat: Chat) -> str:
        """Return the prompt's text. Raises RequestError `template_failed` if the template fails."""
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
        """Whether the prompt shows an initial system message; None if the template refuses the
        message.
        """
        return self._shows({"role": "system", "content": _PROBE_TEXT}, _USER)

    @cached_property
    def shows_later_system(self) -> bool | None:
        """Whether the prompt shows a later system message; None if the template refuses the
        message.
        """
        return self._shows(_USER, _ASSISTANT, {"role": "system", "content": _PROBE_TEXT}, _USER)

    def _shows(self, *messages: Message) -> bool | None:
        try:
            return _PROBE_TEXT in self.render(Chat(messages))
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
            if chat.tools and self._has_system_tools:
                variables["messages"] = _with_system_tools(messages, chat.tools)
            text = self._environment.render(template, variables)
            text.encode()
            return text
        except UnicodeEncodeError:
            raise _error(
                "The chat template wrote half of a surrogate pair, which is not text."
            ) from None
        except Overrun as error:
            raise _error(f"{OVERRAN}: it {error}.") from None
        except jinja2.TemplateError as error:
            words = error.message or "The chat template refused the messages."
            raise _error(words, TemplateRefused) from error
        except (MemoryError, OverflowError, RecursionError) as error:
            raise _error(f"{OVERRAN}: it nests or grows without end.") from error
        # A template may raise anything, depending on the messages.
        except Exception as error:
            words = "The chat template cannot render these messages."
            raise _error(words, TemplateRefused) from error

    def _compile(self, source: str) -> jinja2.Template:
        """Compile a template. Raises ModelError with one sentence about the error."""
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            why = f"{_shortened(error.message or '')} (line {error.lineno})"
        except jinja2.TemplateError as error:
            why = _shortened(error.message or "")
        except (MemoryError, RecursionError, OverflowError, SyntaxError):
            why = "it nests too deeply"
        except ValueError:
            why = "it has a number with too many digits"
        where = f" in {self._file}" if self._file else ""
        raise ModelError(
            f"The chat template{where} is not valid: {why}; correct it, or "
            "give another template with --chat-template.",
            "tokenizer_invalid",
        )


def _shortened(words: str) -> str:
    return " ".join(words[:_MAX_REASON].split())


def _error(message: str, kind: type[RequestError] = RequestError) -> RequestError:
    """Return the error for a template's message, which may be very long or not valid Unicode."""
    words = message[:_MAX_MESSAGE].encode(errors="replace").decode()
    return kind("template_failed", words, "messages")


def for_template(message: Message) -> Message:
    """Return a copy of a message for the template.

    The role developer becomes system, and the arguments of calls are parsed. Reasoning gets all
    names under which templates look for it.
    """
    message = dict(message)
    if message.get("role") == "developer":
        message["role"] = "system"
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        message["reasoning_content"] = message["reasoning"] = reasoning
        # gpt-oss's template refuses a call with both a text and `thinking`.
        if not (message.get("tool_calls") and message.get("content")):
            message["thinking"] = reasoning
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return message


def _with_system_tools(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Write the tools into the system message; add a system message if there is none."""
    has_system = bool(messages) and messages[0].get("role") == "system"
    system = messages[0] if has_system else {"role": "system", "content": ""}
    functions = [tool.get("function", tool) for tool in tools]
    written = json.dumps(functions, ensure_ascii=False)
    return [system | {"tools": written}, *messages[has_system:]]


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    # A model may have written invalid JSON; the template gets these arguments unchanged.
    except (ValueError, RecursionError):
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
    """Return a description of the file that contains the template, for errors."""
    if of_gguf := [path.name for path in folder.glob("*.gguf") if path.name != MMPROJ]:
        return of_gguf[0]
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return (
        f"{next((name for name in names if (folder / name).exists()), 'a file')} of {folder.name}"
    )


def _config_sources(folder: Path) -> dict[str, str]:
    """Read `chat_template` from the configs: a text, or a list of named templates."""
    sources: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _read_config(folder / name).chat_template if (folder / name).exists() else None
        if isinstance(found, str):
            sources["default"] = found
        elif found:
            sources |= {named.name: named.template for named in found}
    return sources


def _read_config(file: Path) -> _Config:
    try:
        return msgspec.json.decode(_read(file), type=_Config)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"The chat_template in {file.name} must be a text or a list of named templates.",
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
