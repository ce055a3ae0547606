"""`headrace generate`: continues one prompt in this process; the text goes to stdout."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoints.find import MINI, is_hub_id
from headrace.cli.download import DownloadLine
from headrace.core.config import ServerConfig
from headrace.core.errors import ConfigError
from headrace.llm import LLM


def split_words(words: Sequence[str]) -> tuple[str | None, str | None]:
    """MODEL and PROMPT of up to two words; one alone is the prompt unless it names a model."""
    if len(words) > 2:
        raise ConfigError(f"generate takes MODEL and PROMPT; {len(words)} words are too many.")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    return (words[0], None) if _names_model(words[0]) else (None, words[0])


def read_prompt(prompt: str | None) -> str:
    """The prompt itself, or what comes on stdin, without the newline at its end."""
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("No prompt: give one, or - to read it from stdin.")
    if prompt in (None, "-"):
        return sys.stdin.read().removesuffix("\n")
    return prompt or ""


def read_schema(name: str) -> dict[str, Any]:
    """The JSON Schema in a file."""
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"--schema {name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--schema {name} has no JSON object; a schema is one.") from None


def generate(config: ServerConfig, prompt: str, fields: dict[str, Any], as_json: bool) -> None:
    with LLM(config, DownloadLine(config.models[0].model)) as llm:
        if as_json:
            answer = msgspec.json.encode(llm.generate(prompt, **fields))
            print(answer.decode())
        elif fields.get("n", 1) == 1:
            for piece in llm.stream(prompt=prompt, **fields):
                print(piece.text, end="", flush=True)
            print()
        else:  # choices would run into each other
            for choice in llm.generate(prompt, **fields).choices:
                print(choice.text)


def split_inputs(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """MODEL and the texts: the first word is a text, too, unless it names a model."""
    if words and _names_model(words[0]):
        return words[0], list(words[1:])
    return None, list(words)


def read_inputs(words: Sequence[str]) -> list[str]:
    """The texts themselves; without any, or for -, the lines that come on stdin."""
    if not words and sys.stdin.isatty():
        raise ConfigError("No text: give one, or - to read lines from stdin.")
    found: list[str] = []
    for word in words or ["-"]:
        found += sys.stdin.read().splitlines() if word == "-" else [word]
    return found


def embed(config: ServerConfig, texts: list[str], fields: dict[str, Any]) -> None:
    """Prints a JSON array for each text, on a line of its own."""
    with LLM(config, DownloadLine(config.models[0].model)) as llm:
        for vector in llm.embed(texts, **fields):
            print(msgspec.json.encode(vector).decode())


def _names_model(word: str) -> bool:
    return word == MINI or is_hub_id(word) or Path(word).expanduser().is_dir()
