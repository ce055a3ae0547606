"""Decodes, checks, renders and tokenizes what clients send, where it may be killed.

`python -m headrace.protocols.worker SOCKET` does such jobs, one at a time. It bounds itself;
its server sees by which signal it died.
"""

import contextlib
import functools
import hashlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.protocols import batch_lines, body_names
from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.body_names import MODEL
from headrace.protocols.dialect import dialect_of, encode
from headrace.protocols.fields import structure
from headrace.protocols.fields.common import TokenIds, ignored, max_tokens, read_known
from headrace.protocols.fields.kinds import Flag, Kind, String, missing, read_fields
from headrace.protocols.fields.messages import placeholder_in_text, refuse_images, texts_of, unseen
from headrace.protocols.fields.unknown import header_of, renamed, unknown_within
from headrace.protocols.grammars import NO_GRAMMAR
from headrace.protocols.inserted_texts import take_out
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.openai.response_items import PAST, messages_of
from headrace.protocols.prompt_ids import ids_of, listed_tokens, prompts_of, put_images, render
from headrace.protocols.requests import check_token_ids, decode, exact_schemas, pack
from headrace.protocols.vectors import embeddings, rerank
from headrace.protocols.worker_model import Bound, MemoryBound, WorkerModel, in_worker
from headrace.text.model_names import Aliases, Models, adapters_of, names_of, paths_of
from headrace.text.text_model import TextModel, longest_prompt
from headrace.workers.pool import (
    IMAGE_MEMORY_BYTES,
    IMAGES,
    JOB_S,
    MEMORY_BYTES,
    TEMPLATE_S,
    perform,
)
from headrace.workers.process import receive, reply
from headrace_common import jobs
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.jobs import CheckedBody, Encoded, EncodedAhead, Refusal, SeenImages
from headrace_common.request import Chat, Infill, Prompt, Route, Text

logger = logging.getLogger(__name__)

_SOURCES = ("content", "prompt", "messages")
_TEXT_ONLY = "this model takes text only"

APPLY_TEMPLATE: Mapping[str, Kind] = {**openai_chat.TEMPLATE, **MODEL}
DETOKENIZE: Mapping[str, Kind] = {"tokens": TokenIds(), **MODEL}
TOKENIZE: Mapping[str, Kind] = {
    "content": String(),
    "add_special": Flag(),
    "parse_special": Flag(),
    "with_pieces": Flag(),
    "prompt": String(),
    "add_special_tokens": Flag(),
    "return_token_strs": Flag(),
    **openai_chat.TEMPLATE,
    **MODEL,
}

_earlier_of = msgspec.msgpack.Decoder(openai_responses.Earlier).decode


class Jobs:
    """The doing of all jobs; `rendering` bounds the time of a chat template."""

    def __init__(
        self,
        *models: TextModel | WorkerModel,
        rendering: Bound = contextlib.nullcontext,
        aliases: Aliases | None = None,
    ) -> None:
        self._texts = Models(tuple(map(in_worker, models)), aliases)
        self._rendering = rendering

    def do(self, job: jobs.AnyJob, body: bytes) -> object:
        """The job's result; RequestError if it refuses `body`."""
        match job:
            case jobs.ReadBody(route):
                return self._with_tokens(job, self.read(body, route, job.client))
            case jobs.ReadInputs(is_prompt=is_prompt, may_be_empty=may_be_empty):
                given = decode(body)
                if is_prompt and "prompt" in given:
                    given["input"] = given.pop("prompt")
                if may_be_empty and given.get("input") in (None, "", []):
                    return self._no_inputs(given)
                return self._with_tokens(job, self.inputs(given))
            case jobs.ReadPairs():
                return self._with_tokens(job, self.query(decode(body)))
            case jobs.GoOn():
                return self.go_on(body)
            case jobs.EncodePrompts():
                return self._encode_prompts(job, body)
            case jobs.EncodePairs():
                return self._encode_pairs(job, body)
            case jobs.PutImages(sizes):
                return put_images(body, sizes)
            case jobs.SeeImages():
                return self._see_images(job, body)
            case jobs.WriteVectors():
                return embeddings.entries(body, job)
            case jobs.RankDocuments():
                return self.rank(job, body)
            case jobs.ListInput():
                page = (job.stream_id, job.limit, job.is_rising, job.after)
                return openai_responses.input_items(body, *page)
            case jobs.CheckLines() | jobs.OpenLine() | jobs.ReadBatch() | jobs.SplitRequests():
                return batch_lines.do(job, body, self._check)
            case jobs.ReadModelName():
                return body_names.required_model_name(body)
            case jobs.NameModels(place):
                return self._named(body, place)
            case jobs.ReadNames():
                return body_names.conversation_names(body)
            case jobs.Tokenize(max_model_len):
                return self.tokenize(body, max_model_len)
            case jobs.CountTokens(client):
                return self.count_tokens(body, client)
            case jobs.Detokenize():
                return self._detokenize(body)
            case jobs.ApplyTemplate():
                return self.apply_template(body)

    def read(self, body: bytes, route: Route, client: str = "") -> CheckedBody:
        """Checks the body of a generation route."""
        digest = hashlib.sha256(route.encode() + b"\n" + body).digest()
        dialect = dialect_of(route)
        given = decode(body)
        exact = exact_schemas(body, given)
        inserted = take_out(given, route, client)
        with self._noting(given):
            fields = dialect.read(given)
            left_out = self.constrain(fields, exact)
            self.refuse_unseen(fields)
        checked = pack(dialect, fields)
        within = unknown_within(given, route)
        left_out = tuple(renamed(left_out, getattr(dialect.ERRORS, "OWN_PATHS", ())))
        names = header_of((*ignored(dialect.TABLE, given), *checked.ignored, *left_out, *within))
        return msgspec.structs.replace(checked, digest=digest, ignored=names, inserted=inserted)

    def _named(self, body: bytes, place: jobs.ModelsNamedIn) -> tuple[str, ...]:
        """The models whose files a job for this body would read."""
        names = body_names.model_names(body, place)
        texts = [self._asked({} if name is None else {"model": name}) for name in names]
        return tuple(sorted({text.names[0] for text in texts if text}))

    def _check(self, body: bytes, route: Route) -> str | None:
        """The model that a line's body names; RequestError if its route would refuse it."""
        if route == embeddings.ROUTE:
            checked = self.inputs(decode(body))
        elif route in rerank.ROUTES:
            checked = self.query(decode(body))
        else:
            checked = self.read(body, route)
        return checked.fields.get("model")

    def constrain(
        self, fields: dict[str, Any], exact: Mapping[int, Any] | None = None
    ) -> tuple[str, ...]:
        """Make one grammar of the fields that ask for a form; return the paths that it leaves out.

        RequestError names a fault.
        """
        wanted = structure.take(fields, exact)
        text = self._asked(fields)
        made = text.grammars.make(wanted) if wanted and text else NO_GRAMMAR
        fields["constraint"] = (made.grammar, made.tags)
        return made.ignored

    def refuse_unseen(self, fields: dict[str, Any]) -> None:
        """RequestError for images that the model cannot see."""
        items = fields.get("input")
        messages = fields.get("messages", ()) if items is None else messages_of(items)
        try:
            refuse_images(messages, _TEXT_ONLY)
        except RequestError:
            text = self._asked(fields)
            if text and not text.model.has_vision:
                raise

    @contextlib.contextmanager
    def _noting(self, given: Mapping[str, Any]) -> Iterator[None]:
        """A refusal within notes for the log which of the models was asked."""
        try:
            yield
        except RequestError as error:
            name = given.get("model")
            text = self._texts.answering(name) if isinstance(name, str) else self._texts.first
            if text is not None:
                error.noting(model=text.names[0])
            raise

    def _asked(self, fields: dict[str, Any]) -> WorkerModel | None:
        """The model that is asked for; None for a name that nobody has.

        Such a request is refused later, unless it finds the stream of an earlier one.
        """
        name = fields.get("model")
        return self._texts.first if name is None else self._texts.answering(name)

    def go_on(self, packed: bytes) -> CheckedBody:
        """A body of /v1/responses with the conversation that it goes on from."""
        checked = openai_responses.go_on(*_earlier_of(packed))
        (chat,) = checked.stubs
        assert isinstance(chat, Chat)
        text = self._asked(checked.fields)
        if chat.num_images and text and not text.model.has_vision:
            raise unseen(PAST, _TEXT_ONLY)
        return checked

    def _with_tokens(self, job: jobs.ReadJob, checked: CheckedBody) -> CheckedBody:
        """The body with its tokens, where its model is known and they need nothing else.

        A refusal is left to the job that asks for them alone: what else is wrong comes before.
        """
        name = checked.fields.get("model")
        text = self._texts.first if name is None else self._texts.answering(name)
        known = job.known.get(text.names[0]) if text else None
        if text is None or known is None or not _is_whole(checked):
            return checked
        try:
            longest = known.max_model_len
            if isinstance(job, jobs.ReadBody):
                longest = longest_prompt(text.model, longest, max_tokens(checked.fields))
            if isinstance(job, jobs.ReadPairs):
                encoded = self._encode_pairs(jobs.EncodePairs(longest, name), checked.packed)
            else:
                to_embed = isinstance(job, jobs.ReadInputs)
                asked = jobs.EncodePrompts(longest, name, to_embed)
                encoded = self._encode_prompts(asked, checked.packed)
        except (RequestError, MemoryError):
            return checked
        ahead = EncodedAhead(known.number, longest, encoded)
        return msgspec.structs.replace(checked, ahead=ahead)

    def _encode_prompts(self, job: jobs.EncodePrompts, packed: bytes) -> Encoded:
        text = self._texts.get(job.model)
        found, ways, changes = list[bytes](), list[str](), list[str]()
        limit = text.model.sentences.max_tokens if job.to_embed else None
        for prompt in prompts_of(packed):
            token_ids, way, own = ids_of(text.model, prompt, self._rendering, job.longest)
            if limit is not None and isinstance(prompt, Text):
                token_ids = text.model.tokenizer.cut(token_ids, limit, prompt.add_special_tokens)
            text.check_placeholders(token_ids)
            found.append(token_ids.tobytes())
            ways.append(way)
            changes += own
            if len(token_ids) > job.longest:
                break
        return Encoded(tuple(found), max(ways, default=None), changes=tuple(changes))

    def _see_images(self, job: jobs.SeeImages, packed: bytes) -> SeenImages:
        text = self._texts.get(job.model)
        (chat,) = prompts_of(packed)
        assert isinstance(chat, Chat)
        placeholder = text.image_processor.placeholder
        for message in chat.messages:
            if placeholder and placeholder in texts_of(message["content"]):
                raise placeholder_in_text(chat.image_params[0].partition("[")[0])
        shown, changes = render(text.model, chat, self._rendering)
        prepared = text.image_processor.prepare(shown, chat.images, chat.image_params, job.path)
        return SeenImages(prepared.token_ids.tobytes(), prepared.inputs, changes)

    def inputs(self, given: dict[str, Any]) -> CheckedBody:
        """Checks a decoded body of /v1/embeddings."""
        with self._noting(given):
            fields = embeddings.read(given)
        model = self._texts.get(fields.get("model")).model
        fields["is_list"] = fields["input"].is_list
        embeddings.add_prompt(fields, model.sentences)
        checked = pack(embeddings, fields)
        return msgspec.structs.replace(checked, ignored=ignored(embeddings.TABLE, given))

    def _no_inputs(self, given: dict[str, Any]) -> CheckedBody:
        """Check all fields but the input, which is empty."""
        given = {name: value for name, value in given.items() if name != "input"}
        with self._noting(given):
            fields = read_known(embeddings.TABLE, (), given)
        self._texts.get(fields.get("model"))
        names = ignored(embeddings.TABLE, given)
        return CheckedBody(fields | {"is_empty": True}, (), b"", ignored=names)

    def query(self, given: dict[str, Any]) -> CheckedBody:
        """Checks a decoded body of /v1/rerank."""
        with self._noting(given):
            fields = rerank.read(given)
        packed = msgspec.msgpack.encode((fields.pop("query"), fields.pop("documents")))
        names = ignored(rerank.TABLE, given)
        return CheckedBody(fields, (), packed, ignored=names)

    def _encode_pairs(self, job: jobs.EncodePairs, packed: bytes) -> Encoded:
        model = self._texts.get(job.model).model
        query, documents = rerank.pairs_of(packed)
        found: list[bytes] = []
        num_first = 0
        for document in documents:
            token_ids, num_first = model.tokenizer.encode_pair(query, document)
            found.append(token_ids.tobytes())
            if len(token_ids) > job.longest:
                break
        return Encoded(tuple(found), num_first=num_first)

    def rank(self, job: jobs.RankDocuments, packed: bytes) -> bytes:
        """The results of an answer with a ranking, as JSON."""
        num = len(rerank.pairs_of(packed)[1])
        is_logit = self._texts.get(job.model).model.sentences.score_is_logit
        scores = rerank.relevance(job.vectors, num, is_logit)
        return rerank.ranking(packed, scores, job.top_n, job.shows_documents)

    def tokenize(self, body: bytes, max_model_len: Mapping[str, int]) -> bytes:
        model, fields = self._read(body, TOKENIZE)
        given = [name for name in _SOURCES if name in fields]
        if len(given) != 1:
            message = f"Send exactly one of {', '.join(_SOURCES)}; {len(given)} were sent."
            code = "invalid_value" if given else "missing_required_parameter"
            raise RequestError(code, message, given[1] if given else "content")
        if not fields.get("parse_special", True):
            message = "parse_special: false is not supported here; leave it out."
            raise RequestError("unsupported_parameter", message, "parse_special")
        token_ids = ids_of(model, _to_prompt(fields), self._rendering).token_ids.tolist()
        longest = max_model_len.get(model.names[0], model.max_model_len)
        return encode(listed_tokens(model, token_ids, fields) | {"max_model_len": longest})

    def count_tokens(self, body: bytes, client: str = "") -> jobs.TokenCount:
        given = decode(body)
        take_out(given, anthropic_messages.ROUTE, client)
        with self._noting(given):
            fields = anthropic_messages.read_counted(given)
        model = self._texts.get(fields["model"]).model
        (prompt,) = anthropic_messages.to_prompts(fields)
        within = unknown_within(given, anthropic_messages.ROUTE)
        unused = ignored(anthropic_messages.TABLE, given)
        names = header_of((*unused, *fields["skipped"], *within))
        return jobs.TokenCount(len(ids_of(model, prompt, self._rendering).token_ids), names)

    def _detokenize(self, body: bytes) -> bytes:
        model, fields = self._read(body, DETOKENIZE, "tokens")
        check_token_ids(fields["tokens"], "tokens", model.vocab_size)
        text = model.tokenizer.decode(fields["tokens"], False)
        return encode({"content": text, "prompt": text})

    def apply_template(self, body: bytes) -> bytes:
        model, fields = self._read(body, APPLY_TEMPLATE, "messages")
        rendered = render(model, openai_chat.read_chat(fields), self._rendering)
        return encode({"prompt": rendered.text})

    def _read(
        self, body: bytes, table: Mapping[str, Kind], required: str | None = None
    ) -> tuple[TextModel, dict[str, Any]]:
        given = decode(body)
        with self._noting(given):
            if required and given.get(required) is None:
                raise missing(required)
            fields = read_fields(table, given)
            refuse_images(fields.get("messages", ()), "this route takes text only")
        return self._texts.get(fields.get("model")).model, fields


def _is_whole(checked: CheckedBody) -> bool:
    """Whether its tokens need neither an image nor an earlier response nor marks for a gap."""
    goes_on = "previous_response_id" in checked.fields
    return not goes_on and not any(
        isinstance(prompt, Infill) or (isinstance(prompt, Chat) and prompt.num_images)
        for prompt in checked.stubs
    )


def _to_prompt(fields: dict[str, Any]) -> Prompt:
    if "content" in fields:
        return Text(fields["content"], fields.get("add_special", False))
    if "prompt" in fields:
        return Text(fields["prompt"], fields.get("add_special_tokens", True))
    return openai_chat.read_chat(fields)


def main() -> None:
    with contextlib.suppress(ConnectionError):  # the server has gone, in the middle of a job
        _work(socket.socket(fileno=int(sys.argv[1])), is_for_images=IMAGES in sys.argv[2:])


def _work(connection: socket.socket, is_for_images: bool) -> None:
    start = receive(connection)
    if start is None:
        return
    bound = MemoryBound(IMAGE_MEMORY_BYTES if is_for_images else MEMORY_BYTES)
    start_type = tuple[tuple[ModelConfig, ...], tuple[str, ...]]
    configs, aliases = msgspec.msgpack.decode(start[1], type=start_type)
    texts = [
        WorkerModel(
            (*names_of(config), *adapters_of(config)),
            functools.partial(TextModel, config),
            bound.lifted,
            paths_of(config),
        )
        for config in configs
    ]
    own = Jobs(*texts, rendering=_rendering, aliases=Aliases(aliases))
    if is_for_images:
        os.nice(19)  # whatever it takes, streams go first
    if len(texts) == 1:  # it will be asked for
        with contextlib.suppress(RequestError):  # each job will say so
            _ = texts[0].image_processor if is_for_images else texts[0].grammars
    bound.set()
    reply(connection, b"")
    while (job := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_VIRTUAL, JOB_S)
        _answer(connection, own, *job)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        del job  # before the next one comes: it may be as large
        if bound.is_near:
            return  # what cannot be given back piece by piece goes with the process


def _answer(connection: socket.socket, own: Jobs, head: bytes, body: bytes) -> None:
    result, refusal = b"", b""
    try:
        result = perform(own, head, body)
    except RequestError as error:
        refusal = msgspec.msgpack.encode(Refusal.of(error))
    except Exception:
        logger.exception("A job failed")
        failure = RequestError("internal_error", "The server failed on this request.")
        refusal = msgspec.msgpack.encode(Refusal.of(failure))
    reply(connection, result, refusal)


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
    """A template may be in one call for minutes: only the system can end that."""
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
