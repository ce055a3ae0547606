"""`headrace generate` and `headrace embed`: compute in this process and write to stdout."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli import exit_codes
from headrace.cli.load_lines import LoadView
from headrace.cli.logs import say
from headrace.cli.stdio import printed, read_stdin
from headrace.llm.llm import LLM
from headrace.protocols.fields import structure
from headrace.protocols.fields.common import max_tokens
from headrace.protocols.openai import completions as openai_completions
from headrace.protocols.openai.completions import DEFAULT_MAX_TOKENS
from headrace.protocols.vectors import embeddings
from headrace_common.answer import is_json
from headrace_common.checkpoints.catalog import catalog
from headrace_common.checkpoints.find import MINI, can_be_fetched, find_here, is_hub_id, place_of
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import ConfigError

_PATHS, _FILES = ("./", "../", "~", "/"), (".gguf", ".safetensors")
_LIMITS = {"max_tokens", "max_completion_tokens"}


def split_words(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Split up to two words into MODEL and PROMPT."""
    if len(words) > 2:
        raise ConfigError(f"generate takes MODEL and PROMPT; {len(words)} words are too many.")
    model, prompts = split_inputs(words)
    if len(prompts) > 1:
        raise ConfigError(f"generate takes one prompt; {prompts[0]!r} is not the name of a model.")
    return model, prompts[0] if prompts else None


def split_inputs(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the model, if the first word names a model, and the texts.

    If there are several words, the first is the model unless it contains spaces. A single word is a
    text unless it names a model on this machine. Raises ConfigError for a path that does not exist,
    because the path would silently become a text.
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
            f"a name that `headrace models available` lists. To use {first!r} as a text, put the "
            "name of a model before it."
        )
    if not has_spaces and ("/" in first or first[0] == "."):
        say(
            f"headrace: {first!r} is used as the text, because no model on this machine has that "
            "name. To use it as a model, add the text, or - for stdin, after it."
        )
    return None, list(words)


def say_model(config: ServerConfig) -> None:
    """On a terminal, say which model answers if the user has named none."""
    if sys.stderr.isatty():
        say(
            f"headrace: {config.models[0].model} answers. To use another model, put its name "
            "before the prompt."
        )


def read_prompt(prompt: str | None) -> str:
    """Return the prompt, or stdin without its final newline."""
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("There is no prompt; add a prompt, or - to read the prompt from stdin.")
    if prompt in (None, "-"):
        return read_stdin().removesuffix("\n")
    return prompt or ""


def read_schema(name: str) -> dict[str, Any]:
    """Read a JSON Schema from a file."""
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"--schema {name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--schema {name} does not contain a JSON object, as a schema must."
        ) from None


def check_fields(fields: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Return the fields to send. Raises RequestError for a wrong field, before the model loads.

    Text that follows a schema or a grammar has no length limit by default.
    """
    openai_completions.read(fields | {"prompt": prompt})
    if _is_constrained(fields) and not fields.keys() & _LIMITS:
        return fields | {"max_tokens": -1}
    return fields


def generate(config: ServerConfig, prompt: str, fields: dict[str, Any], as_json: bool) -> int:
    """Print the text. The exit code says whether constrained text was truncated."""
    with _loaded(config) as llm:
        ended = list(_printed(llm, prompt, fields, as_json))
        num_cut = sum(reason == "length" for _, reason in ended)
        if num_cut:
            choices = "The text" if len(ended) == 1 else f"{num_cut} of {len(ended)} texts"
            say(f"headrace: {choices} {_cut(fields, llm.ready.max_model_len)}")
    is_broken = any(reason == "length" and not is_json(text) for text, reason in ended)
    return exit_codes.FAILED if is_broken and _is_constrained(fields) else exit_codes.DONE


@contextmanager
def _loaded(config: ServerConfig) -> Iterator[LLM]:
    with LoadView() as view:
        llm = LLM(config, view)
    with llm:
        yield llm


def _printed(
    llm: LLM, prompt: str, fields: dict[str, Any], as_json: bool
) -> Iterator[tuple[str, str | None]]:
    """Print the text as it arrives, and yield the text and finish reason of each choice."""
    # Several choices would mix on the terminal, so they are printed one after the other.
    if as_json or fields.get("n", 1) != 1:
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
        room = "use a larger --max-model-len or a shorter prompt."
        return f"reached the end of the context of {max_model_len} tokens; {room}"
    return f"was cut off after {most} tokens; allow more with -o max_tokens=N."


def _is_constrained(fields: dict[str, Any]) -> bool:
    return any(fields.get(name) is not None for name in structure.FIELDS)


def read_inputs(words: Sequence[str]) -> list[str]:
    """Return the texts: the words, or the lines of stdin if there are no words or only `-`."""
    if not words and sys.stdin.isatty():
        raise ConfigError("There is no text; add a text, or - to read lines from stdin.")
    found: list[str] = []
    for word in words or ["-"]:
        found += read_stdin().splitlines() if word == "-" else [word]
    return found


def embed(config: ServerConfig, texts: list[str], fields: dict[str, Any]) -> None:
    """Print a JSON array for each text, on a separate line."""
    # Check the fields before the model loads.
    embeddings.read(fields | {"input": texts})
    with _loaded(config) as llm:
        for vector in llm.embed(texts, **fields):
            print(msgspec.json.encode(vector.tolist()).decode())


def _is_here(word: str) -> bool:
    """Return whether the word names a model on this machine.

    The short name of a known model counts even if the model is not on this machine.
    """
    try:
        place = place_of(word)
        is_there = place is not None and place.exists()
    # The word may be too long for a path, or `~name` may name no user.
    except (OSError, RuntimeError):
        return False
    if place is not None and is_there:
        return place.is_dir() or place.suffix == ".gguf"
    return word == MINI or word in catalog() or (is_hub_id(word) and find_here(word) is not None)
