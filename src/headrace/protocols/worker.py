"""All that decodes, checks, renders or tokenizes what clients send, where it may be killed.

`python -m headrace.protocols.worker SOCKET` does such jobs, one at a time. It bounds itself;
its server sees by which signal it died.
"""

import contextlib
import hashlib
import logging
import os
import resource
import signal
import socket
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.config import ModelConfig
from headrace.core.errors import RequestError
from headrace.core.request import Chat, Ids, Prompt, Route, Text
from headrace.generation.served import Models, ServedModel
from headrace.generation.work import (
    JOB_S,
    MEMORY_BYTES,
    TEMPLATE_S,
    Refusal,
    perform,
    receive,
    reply,
)
from headrace.protocols import anthropic_messages, openai_chat, openai_responses, structure
from headrace.protocols.common_fields import TokenIds, ignored
from headrace.protocols.dialect import dialect_of, encode
from headrace.protocols.fields import Flag, Kind, String, missing, read_fields
from headrace.protocols.grammars import GrammarMaker
from headrace.protocols.requests import CheckedBody, check_token_ids, decode, pack

logger = logging.getLogger(__name__)

_KEPT_BYTES = MEMORY_BYTES // 4  # beyond what it loaded, between two jobs
_MODEL: Mapping[str, Kind] = {"model": String(least=1)}
_SOURCES = ("content", "prompt", "messages")

APPLY_TEMPLATE: Mapping[str, Kind] = {**openai_chat.TEMPLATE, **_MODEL}
DETOKENIZE: Mapping[str, Kind] = {"tokens": TokenIds(), **_MODEL}
TOKENIZE: Mapping[str, Kind] = {
    "content": String(),
    "add_special": Flag(),
    "parse_special": Flag(),
    "with_pieces": Flag(),
    "prompt": String(),
    "add_special_tokens": Flag(),
    "return_token_strs": Flag(),
    **openai_chat.TEMPLATE,
    **_MODEL,
}

_prompts_of = msgspec.msgpack.Decoder(tuple[Prompt, ...]).decode
_earlier_of = msgspec.msgpack.Decoder(tuple[bytes, bytes, CheckedBody]).decode
_encode = msgspec.msgpack.Encoder().encode

Bound = Callable[[], contextlib.AbstractContextManager[None]]


class Jobs:
    """The jobs of one model: each takes a body and a few small arguments, and gives bytes.

    `rendering` bounds the time of a chat template.
    """

    def __init__(self, model: ServedModel, rendering: Bound = contextlib.nullcontext) -> None:
        self._model = model
        self._rendering = rendering

    def read(self, body: bytes, route: Route) -> bytes:
        """A generation route's body as a CheckedBody."""
        digest = hashlib.sha256(route.encode() + b"\n" + body).digest()
        dialect = dialect_of(route)
        given = decode(body)
        fields = dialect.read(given)
        self.constrain(fields)
        checked = pack(dialect, fields)
        names = ignored(dialect.TABLE, given) + checked.ignored
        return _encode(msgspec.structs.replace(checked, digest=digest, ignored=names))

    def constrain(self, fields: dict[str, Any]) -> None:
        """Makes one grammar of the fields that ask for a form; RequestError names a fault."""
        wanted = structure.take(fields)
        if wanted is not None:
            fields["constraint"] = self.grammars.make(wanted)

    @cached_property
    def grammars(self) -> GrammarMaker:
        return GrammarMaker(self._model)

    def go_on(self, packed: bytes) -> bytes:
        """A CheckedBody of /v1/responses with the conversation that it goes on from."""
        return _encode(openai_responses.go_on(*_earlier_of(packed)))

    def input_items(self, kept: bytes, *arguments: Any) -> bytes:
        """A page of what led to a response, as JSON."""
        return openai_responses.input_items(kept, *arguments)

    def prompts(self, packed: bytes, longest: int) -> bytes:
        """Token ids of each prompt, packed as int32; none follow one of more than `longest`."""
        found: list[bytes] = []
        for prompt in _prompts_of(packed):
            token_ids = self._encode(prompt, longest)
            found.append(token_ids.tobytes())
            if len(token_ids) > longest:
                break
        return _encode(found)

    def names(self, body: bytes) -> bytes:
        """The non-empty strings of `conversation_ids`."""
        wanted = decode(body).get("conversation_ids")
        names = wanted if isinstance(wanted, list) else []
        return _encode([name for name in names if isinstance(name, str) and name])

    def tokenize(self, body: bytes, max_model_len: int) -> bytes:
        fields = self._read(body, TOKENIZE)
        given = [name for name in _SOURCES if name in fields]
        if len(given) != 1:
            message = f"Send exactly one of {', '.join(_SOURCES)}; {len(given)} were sent."
            code = "invalid_value" if given else "missing_required_parameter"
            raise RequestError(code, message, given[1] if given else "content")
        if not fields.get("parse_special", True):
            message = "parse_special: false is not supported here; leave it out."
            raise RequestError("unsupported_parameter", message, "parse_special")
        token_ids = self._encode(_to_prompt(fields)).tolist()
        return encode(self._listed(token_ids, fields) | {"max_model_len": max_model_len})

    def count_tokens(self, body: bytes) -> bytes:
        fields = anthropic_messages.read_counted(decode(body))
        Models((self._model,)).get(fields["model"])
        (prompt,) = anthropic_messages.to_prompts(fields)
        return encode({"input_tokens": len(self._encode(prompt))})

    def detokenize(self, body: bytes) -> bytes:
        fields = self._read(body, DETOKENIZE, "tokens")
        check_token_ids(fields["tokens"], "tokens", self._model.vocab_size)
        text = self._model.tokenizer.decode(fields["tokens"], False)
        return encode({"content": text, "prompt": text})

    def apply_template(self, body: bytes) -> bytes:
        fields = self._read(body, APPLY_TEMPLATE, "messages")
        openai_chat.check_template_fields(fields)
        return encode({"prompt": self._render(openai_chat.to_chat(fields))})

    def _read(
        self, body: bytes, table: Mapping[str, Kind], required: str | None = None
    ) -> dict[str, Any]:
        given = decode(body)
        if required and given.get(required) is None:
            raise missing(required)
        fields = read_fields(table, given)
        Models((self._model,)).get(fields.get("model"))
        return fields

    def _encode(self, prompt: Prompt, longest: int | None = None) -> "array[int]":
        """All ids of a prompt, or the first ones, more than `longest`, of one that is too long."""
        match prompt:
            case Ids(token_ids):
                return array("i", token_ids)
            case Text(text, adds_special_tokens):
                pass
            case Chat():
                text, adds_special_tokens = self._render(prompt), False
        encoding = self._model.encoder.begin(text, adds_special_tokens, longest)
        while encoding.advance():
            pass
        return encoding.token_ids

    def _render(self, chat: Chat) -> str:
        if self._model.template is None:
            raise RequestError(
                "unsupported_operation",
                "This model has no chat template; "
                "use /v1/completions, or serve it with --chat-template.",
            )
        with self._rendering():
            return self._model.template.render(chat)

    def _listed(self, token_ids: list[int], fields: dict[str, Any]) -> dict[str, Any]:
        tokenizer, tokens = self._model.tokenizer, list[Any](token_ids)
        if fields.get("with_pieces"):
            tokens = [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in token_ids]
        listed = {"tokens": tokens, "count": len(token_ids)}
        if fields.get("return_token_strs"):
            listed["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return listed


def _to_prompt(fields: dict[str, Any]) -> Prompt:
    if "content" in fields:
        return Text(fields["content"], fields.get("add_special", False))
    if "prompt" in fields:
        return Text(fields["prompt"], fields.get("add_special_tokens", True))
    openai_chat.check_template_fields(fields)
    return openai_chat.to_chat(fields)


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def main() -> None:
    with contextlib.suppress(ConnectionError):  # the server has gone, in the middle of a job
        _work(socket.socket(fileno=int(sys.argv[1])))


def _work(connection: socket.socket) -> None:
    start = receive(connection)
    if start is None:
        return
    jobs = Jobs(ServedModel(msgspec.msgpack.decode(start[2], type=ModelConfig)), _rendering)
    _ = jobs.grammars  # before memory is bounded: it holds the vocabulary
    loaded = _held_bytes()
    with contextlib.suppress(OSError, ValueError):  # then time alone is bounded
        resource.setrlimit(resource.RLIMIT_DATA, (loaded + MEMORY_BYTES,) * 2)
    reply(connection, b"")
    while (job := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_VIRTUAL, JOB_S)
        _answer(connection, jobs, *job)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        del job  # before the next one comes: it may be as large
        if _held_bytes() > loaded + _KEPT_BYTES:
            return  # what cannot be given back piece by piece goes with the process


def _answer(
    connection: socket.socket, jobs: Jobs, name: str, arguments: Sequence[Any], body: bytes
) -> None:
    try:
        result, refused = perform(jobs, name, body, arguments), False
    except RequestError as error:
        result, refused = msgspec.msgpack.encode(Refusal.of(error)), True
    except Exception:
        logger.exception("A job failed")
        failure = RequestError("internal_error", "The server failed on this request.")
        result, refused = msgspec.msgpack.encode(Refusal.of(failure)), True
    reply(connection, result, refused)


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
    """A template may be in one call for minutes: only the system can end that."""
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _held_bytes() -> int:
    """Memory for data, as RLIMIT_DATA counts it; 0 where the system does not tell."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
