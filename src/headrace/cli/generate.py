"""`headrace generate`: continues one prompt in this process; the text goes to stdout."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli import exits
from headrace.cli.load_lines import show
from headrace.cli.logs import clear, say
from headrace.cli.stdio import printed, read_stdin
from headrace.llm import LLM
from headrace.protocols.fields import structure
from headrace.protocols.fields.common import max_tokens
from headrace.protocols.openai import completions as openai_completions
from headrace.protocols.openai.completions import DEFAULT_MAX_TOKENS
from headrace.protocols.vectors import embeddings
from headrace_common.checkpoints.find import MINI, can_be_fetched, find_here, is_hub_id, place_of
from headrace_common.checkpoints.packaged import PACKAGED
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import ConfigError

_PATHS, _FILES = ("./", "../", "~", "/"), (".gguf", ".safetensors")
_LIMITS = {"max_tokens", "max_completion_tokens"}


def split_words(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return MODEL and PROMPT, which up to two words name."""
    if len(words) > 2:
        raise ConfigError(f"generate takes MODEL and PROMPT; {len(words)} words are too many.")
    model, prompts = split_inputs(words)
    if len(prompts) > 1:
        raise ConfigError(f"generate takes one prompt; {prompts[0]!r} is not the name of a model.")
    return model, prompts[0] if prompts else None


def split_inputs(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the model, if the first word names one, and the texts.

    With several words, the first is the model unless it has spaces. A single word is the text
    unless a model of that name is on this machine. Raise ConfigError for a path that does not
    exist: it would become a text, and the user would not notice.
    """
    first, rest = words[0] if words else "", list(words[1:])
    if first.strip() in ("", "-"):
        return None, list(words)
    is_path = first.startswith(_PATHS) or first.endswith(_FILES)
    has_spaces = len(first.split()) > 1
    if _is_here(first) or (rest and can_be_fetched(first) and not is_path):
        return first, rest
    if (rest and is_path) or (not has_spaces and (rest or is_path)):
        raise ConfigError(
            f"There is no model {first!r}; give the path of a folder or a GGUF file, a hub id, or "
            f"{MINI}. To use {first!r} as a text, put the name of a model before it."
        )
    if not has_spaces and ("/" in first or first[0] == "."):
        say(
            f"headrace: {first!r} is used as the text, since no model of that name is on this "
            "machine. To use it as a model, put the text, or - for stdin, after it."
        )
    return None, list(words)


def read_prompt(prompt: str | None) -> str:
    """The prompt itself, or what comes on stdin, without the newline at its end."""
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("No prompt: give one, or - to read it from stdin.")
    if prompt in (None, "-"):
        return read_stdin().removesuffix("\n")
    return prompt or ""


def read_schema(name: str) -> dict[str, Any]:
    """The JSON Schema in a file."""
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"--schema {name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--schema {name} has no JSON object; a schema is one.") from None


def check_fields(fields: dict[str, Any], prompt: str) -> dict[str, Any]:
    """The fields to send; RequestError for one that is wrong, before a model is loaded.

    What follows a schema or a grammar goes on to its end, unless it was given a limit.
    """
    openai_completions.read(fields | {"prompt": prompt})
    if _is_constrained(fields) and not fields.keys() & _LIMITS:
        return fields | {"max_tokens": -1}
    return fields


def generate(config: ServerConfig, prompt: str, fields: dict[str, Any], as_json: bool) -> int:
    """Prints the text; the exit code says whether what should follow a schema was cut."""
    with LLM(config, show) as llm:
        clear()
        ended = list(_printed(llm, prompt, fields, as_json))
        num_cut = sum(reason == "length" for _, reason in ended)
        if num_cut:
            choices = "The text" if len(ended) == 1 else f"{num_cut} of {len(ended)} texts"
            say(f"headrace: {choices} {_cut(fields, llm.ready.max_model_len)}")
    is_broken = any(reason == "length" and not _is_json(text) for text, reason in ended)
    return exits.FAILED if is_broken and _is_constrained(fields) else exits.DONE


def _printed(
    llm: LLM, prompt: str, fields: dict[str, Any], as_json: bool
) -> Iterator[tuple[str, str | None]]:
    """Prints what comes; the text of each choice, and why it ended."""
    if as_json or fields.get("n", 1) != 1:  # choices would run into each other
        answer = llm.generate(prompt, **fields)
        if as_json:
            print(printed(msgspec.json.encode(answer).decode()), flush=True)
        for choice in answer.choices:
            if not as_json:
                print(printed(choice.text), flush=True)
            yield choice.text, choice.finish_reason
        return
    text, reason = "", None
    for piece in llm.stream(prompt=prompt, **fields):
        print(printed(piece.text), end="", flush=True)
        text, reason = text + piece.text, piece.finish_reason
    print(flush=True)
    yield text, reason


def _cut(fields: dict[str, Any], max_model_len: int) -> str:
    most = max_tokens(fields) if fields.keys() & _LIMITS else DEFAULT_MAX_TOKENS
    if most is None:
        room = "a larger --max-model-len or a shorter prompt leaves more room."
        return f"reached the end of the context of {max_model_len} tokens; {room}"
    return f"was cut after {most} tokens; give it more with -o max_tokens=N."


def _is_constrained(fields: dict[str, Any]) -> bool:
    return any(fields.get(name) is not None for name in structure.FIELDS)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def read_inputs(words: Sequence[str]) -> list[str]:
    """The texts themselves; without any, or for -, the lines that come on stdin."""
    if not words and sys.stdin.isatty():
        raise ConfigError("No text: give one, or - to read lines from stdin.")
    found: list[str] = []
    for word in words or ["-"]:
        found += read_stdin().splitlines() if word == "-" else [word]
    return found


def embed(config: ServerConfig, texts: list[str], fields: dict[str, Any]) -> None:
    """Prints a JSON array for each text, on a line of its own."""
    embeddings.read(fields | {"input": texts})  # wrong fields are found before a model is loaded
    with LLM(config, show) as llm:
        clear()
        for vector in llm.embed(texts, **fields):
            print(msgspec.json.encode(vector).decode())


def _is_here(word: str) -> bool:
    """Return whether a word names a model on this machine, or is a short name of a known model."""
    try:
        place = place_of(word)
        is_there = place is not None and place.exists()
    except (OSError, RuntimeError):  # too long for a path; "~" before the name of no user
        return False
    if place is not None and is_there:
        return place.is_dir() or place.suffix == ".gguf"
    return word == MINI or word in PACKAGED or (is_hub_id(word) and find_here(word) is not None)
