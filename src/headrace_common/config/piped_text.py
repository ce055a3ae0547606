"""Reads chat templates that are given as a pipe, such as `--chat-template <(make-template)`.

A pipe can be read only once, and only by this process, but each worker loads the template again.
So the settings store the text instead of the path.
"""

import os
import select
import stat
import time

import msgspec

from headrace_common.config.settings import ServerConfig
from headrace_common.errors import ConfigError

MAX_BYTES = 1 << 20
_MAX_WAIT_S = 10.0


def with_piped_templates(config: ServerConfig) -> ServerConfig:
    """Replace the path of each piped chat template with the template's text."""
    paths = {model.chat_template for model in config.models if model.chat_template}
    texts = {path: _read_pipe(path) for path in paths if _is_pipe(path)}
    replace = msgspec.structs.replace
    models = tuple(
        replace(model, chat_template=texts.get(model.chat_template or "", model.chat_template))
        for model in config.models
    )
    return replace(config, models=models)


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    # An impossible path causes a ValueError.
    except (OSError, ValueError):
        return False


def _read_pipe(path: str) -> str:
    """Read a pipe.

    Raises ConfigError if the text is too long, not UTF-8, empty or arrives too slowly.
    """
    deadline = time.monotonic() + _MAX_WAIT_S
    content = b""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as pipe:
            while len(content) <= MAX_BYTES:
                left_s = max(0.0, deadline - time.monotonic())
                if not select.select([pipe], [], [], left_s)[0]:
                    raise ConfigError(
                        f"--chat-template: the pipe {path} sent nothing for "
                        f"{_MAX_WAIT_S:g} s; use a file instead."
                    )
                if not (piece := pipe.read(1 << 16)):
                    break
                content += piece
        text = content.decode()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"--chat-template: the pipe {path} cannot be read as UTF-8 text; use a file instead."
        ) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"--chat-template: the pipe {path} holds more than {MAX_BYTES:,} bytes, the "
            "limit for a chat template."
        )
    if not text.strip():
        raise ConfigError(f"--chat-template: the pipe {path} is empty; write a template into it.")
    # A value that ends with a line break is a template, not a path. Jinja removes the line break.
    return text if text.endswith("\n") else f"{text}\n"
