"""Runs in a worker process: decodes, checks, renders and tokenizes what clients send.

`python -m headrace.protocols.worker SOCKET` executes these jobs one at a time. The process
limits its own time and memory; the server learns from the fatal signal which limit was
exceeded.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import signal
import socket
import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.protocols import batch_lines, body_names
from headrace.protocols.body_names import MODEL
from headrace.protocols.dialect import DIALECTS, dialect_of, encode
from headrace.protocols.fields import structure
from headrace.protocols.fields.common import TokenIds, cache_salt, ignored, max_tokens, read_known
from headrace.protocols.fields.kinds import Flag, Kind, String, missing, read_fields
from headrace.protocols.fields.messages import (
    TEXT_ONLY,
    placeholder_in_text,
    refuse_images,
    texts_of,
)
from headrace.protocols.fields.unknown import header_of, renamed, unknown_within
from headrace.protocols.grammars import NO_GRAMMAR
from headrace.protocols.inserted_texts import remove_inserted
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.prompt_ids import ids_of, listed_tokens, prompts_of, put_images, render
from headrace.protocols.requests import check_token_ids, decode, exact_schemas, pack
from headrace.protocols.vectors import embeddings, rerank, score
from headrace.protocols.worker_model import Bound, MemoryBound, WorkerModel, WorkerModels
from headrace.text.model_names import Aliases, adapters_of, names_of, paths_of
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
from headrace_common import worker_jobs
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Infill, Prompt, Route, Text
from headrace_common.sampling import Sampling
from headrace_common.worker_jobs import CheckedBody, Encoded, EncodedAhead, Refusal, SeenImages

logger = logging.getLogger(__name__)

_SOURCES = ("content", "prompt", "messages")

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


class Jobs:
    """Executes the jobs of a worker. `rendering` bounds the time of a chat template."""

    def __init__(
        self,
        *models: TextModel | WorkerModel,
        rendering: Bound = contextlib.nullcontext,
        aliases: Aliases | None = None,
    ) -> None:
        self._texts = WorkerModels(models, rendering, aliases)

    def do(self, job: worker_jobs.AnyJob, body: bytes) -> object:
        """Return the job's result. Raise RequestError if the job refuses `body`."""
        match job:
            case worker_jobs.ReadBody(route):
                return self._with_tokens(job, self.read(body, route, job.client))
            case worker_jobs.ReadInputs(is_prompt=is_prompt, may_be_empty=may_be_empty):
                given = decode(body)
                if is_prompt and "prompt" in given:
                    given["input"] = given.pop("prompt")
                if may_be_empty and given.get("input") in (None, "", []):
                    return self._no_inputs(given)
                return self._with_tokens(job, self.inputs(given))
            case worker_jobs.ReadPairs(route):
                return self._with_tokens(job, self.pairs(decode(body), route))
            case worker_jobs.EncodePrompts():
                return self._encode_prompts(job, body)
            case worker_jobs.EncodePairs():
                return self._encode_pairs(job, body)
            case worker_jobs.PutImages(sizes):
                return put_images(body, sizes)
            case worker_jobs.SeeImages():
                return self._see_images(job, body)
            case worker_jobs.WriteVectors():
                return embeddings.entries(body, job)
            case worker_jobs.RankDocuments():
                return self.rank(job, body)
            case worker_jobs.WriteScores():
                return score.entries(self._relevance(job, body))
            case (
                worker_jobs.CheckLines()
                | worker_jobs.OpenLine()
                | worker_jobs.ReadBatch()
                | worker_jobs.SplitRequests()
            ):
                return batch_lines.do(job, body, self._check)
            case worker_jobs.ReadModelName():
                return body_names.required_model_name(body)
            case worker_jobs.NameModels(place):
                return self._named(body, place)
            case worker_jobs.ReadNames():
                return body_names.conversation_names(body)
            case worker_jobs.Tokenize(max_model_len):
                return self.tokenize(body, max_model_len)
            case worker_jobs.Detokenize():
                return self._detokenize(body)
            case worker_jobs.ApplyTemplate():
                return self.apply_template(body)
            case _:
                dialect: Any = dialect_of(job.dialect)
                return dialect.do(job, body, self._texts)

    def read(self, body: bytes, route: Route, client: str = "") -> CheckedBody:
        """Check the body of a generation route."""
        digest = hashlib.sha256(route.encode() + b"\n" + body).digest()
        dialect = dialect_of(route)
        given = decode(body)
        exact = exact_schemas(body, given)
        inserted = remove_inserted(given, route, client)
        with self._texts.noting(given):
            fields = dialect.read(given)
            text = self._texts.asked(fields) if route == openai_chat.ROUTE else None
            if text and text.model.prefills_assistant:
                openai_chat.prefill(fields)
            left_out = self.constrain(fields, exact)
            self.refuse_unseen(fields)
        checked = pack(dialect, fields)
        within = unknown_within(given, route)
        left_out = tuple(renamed(left_out, getattr(dialect.ERRORS, "OWN_PATHS", ())))
        names = header_of((*ignored(dialect.TABLE, given), *checked.ignored, *left_out, *within))
        return msgspec.structs.replace(checked, digest=digest, ignored=names, inserted=inserted)

    def _named(self, body: bytes, place: worker_jobs.ModelsNamedIn) -> tuple[str, ...]:
        """Return the models whose files a job for this body would read."""
        names = body_names.model_names(body, place)
        texts = [self._texts.asked({} if name is None else {"model": name}) for name in names]
        return tuple(sorted({text.names[0] for text in texts if text}))

    def _check(self, body: bytes, route: Route) -> str | None:
        """Return the model that a body names. Raise RequestError if the route refuses the body."""
        if route == embeddings.ROUTE:
            checked = self.inputs(decode(body))
        elif route in (*rerank.ROUTES, *score.ROUTES):
            checked = self.pairs(decode(body), route)
        else:
            checked = self.read(body, route)
        return checked.fields.get("model")

    def constrain(
        self, fields: dict[str, Any], exact: Mapping[int, Any] | None = None
    ) -> tuple[str, ...]:
        """Compile the fields that restrict the answer into one grammar.

        Return the paths of what the grammar does not enforce. Also find the tokens of the sequence
        breakers, if the request has sequence breakers. Raise RequestError if a restriction is
        wrong or cannot be enforced.
        """
        wanted = structure.take(fields, exact)
        text = self._texts.asked(fields)
        made = text.grammars.make(wanted) if wanted and text else NO_GRAMMAR
        fields["constraint"] = (made.grammar, made.tags)
        if text and fields.get("dry_multiplier"):
            texts = fields.get("dry_sequence_breakers", Sampling().dry_sequence_breakers)
            fields["dry_breakers"] = text.breakers.find(texts)
        return made.ignored

    def refuse_unseen(self, fields: dict[str, Any]) -> None:
        """Raise RequestError if the request has images and the model takes text only."""
        try:
            refuse_images(fields.get("messages", ()), TEXT_ONLY)
        except RequestError:
            text = self._texts.asked(fields)
            if text and not text.model.has_vision:
                raise

    def _with_tokens(self, job: worker_jobs.ReadJob, checked: CheckedBody) -> CheckedBody:
        """Add the prompt's tokens if the model is loaded and the body contains the whole prompt.

        If tokenizing fails, return the body without tokens. A later job tokenizes again and
        reports the error, after the checks that take precedence.
        """
        text = self._texts.asked(checked.fields)
        known = job.known.get(text.names[0]) if text else None
        if text is None or known is None or not _is_whole(checked):
            return checked
        try:
            name, longest = checked.fields.get("model"), known.max_model_len
            if isinstance(job, worker_jobs.ReadBody):
                longest = longest_prompt(text.model, longest, max_tokens(checked.fields))
            if isinstance(job, worker_jobs.ReadPairs):
                encoded = self._encode_pairs(worker_jobs.EncodePairs(longest, name), checked.packed)
            else:
                to_embed = isinstance(job, worker_jobs.ReadInputs)
                salt = cache_salt(checked.fields)
                encoding = worker_jobs.EncodePrompts(longest, name, to_embed, salt, owner=job.owner)
                encoded = self._encode_prompts(encoding, checked.packed)
        except (RequestError, MemoryError):
            return checked
        ahead = EncodedAhead(known.number, longest, encoded)
        return msgspec.structs.replace(checked, ahead=ahead)

    def _encode_prompts(self, job: worker_jobs.EncodePrompts, packed: bytes) -> Encoded:
        text = self._texts.get(job.model)
        found, ways, changes = list[bytes](), list[str](), list[str]()
        limit = text.model.sentences.max_tokens if job.to_embed else None
        salt = None if job.cache_salt is None else (job.owner, job.cache_salt)
        for prompt in prompts_of(packed):
            rendering = self._texts.rendering
            token_ids, way, own = ids_of(text.model, prompt, rendering, job.longest, salt)
            if limit is not None and isinstance(prompt, Text):
                token_ids = text.model.tokenizer.cut(token_ids, limit, prompt.add_special_tokens)
            text.check_placeholders(token_ids)
            found.append(token_ids.tobytes())
            ways.append(way)
            changes += own
            if len(token_ids) > job.longest:
                break
        return Encoded(tuple(found), max(ways, default=None), changes=tuple(changes))

    def _see_images(self, job: worker_jobs.SeeImages, packed: bytes) -> SeenImages:
        text = self._texts.get(job.model)
        (chat,) = prompts_of(packed)
        assert isinstance(chat, Chat)
        placeholder = text.image_processor.placeholder
        for message in chat.messages:
            if placeholder and placeholder in texts_of(message["content"]):
                raise placeholder_in_text(chat.image_params[0].partition("[")[0])
        shown, changes = render(text.model, chat, self._texts.rendering)
        prepared = text.image_processor.prepare(shown, chat.images, chat.image_params, job.path)
        return SeenImages(prepared.token_ids.tobytes(), prepared.inputs, changes)

    def inputs(self, given: dict[str, Any]) -> CheckedBody:
        """Check a decoded body of /v1/embeddings."""
        with self._texts.noting(given):
            fields = embeddings.read(given)
        model = self._texts.get(fields.get("model")).model
        fields["is_list"] = fields["input"].is_list
        embeddings.add_prompt(fields, model.sentences)
        checked = pack(embeddings, fields)
        digest = hashlib.sha256(checked.packed).digest()
        names = ignored(embeddings.TABLE, given)
        return msgspec.structs.replace(checked, digest=digest, ignored=names)

    def _no_inputs(self, given: dict[str, Any]) -> CheckedBody:
        """Check all fields of a decoded body except the input, which is empty."""
        given = {name: value for name, value in given.items() if name != "input"}
        with self._texts.noting(given):
            fields = read_known(embeddings.TABLE, (), given)
        self._texts.get(fields.get("model"))
        names = ignored(embeddings.TABLE, given)
        return CheckedBody(fields | {"is_empty": True}, (), b"", ignored=names)

    def pairs(self, given: dict[str, Any], route: Route = rerank.ROUTES[0]) -> CheckedBody:
        """Check a decoded body of a route that ranks or scores texts."""
        form: Any = score if route in score.ROUTES else rerank
        with self._texts.noting(given):
            fields = form.read(given)
        packed = msgspec.msgpack.encode(fields.pop("pairs"))
        names = ignored(form.TABLE, given)
        digest = hashlib.sha256(packed).digest()
        return CheckedBody(fields, (), packed, digest=digest, ignored=names)

    def _encode_pairs(self, job: worker_jobs.EncodePairs, packed: bytes) -> Encoded:
        model = self._texts.get(job.model).model
        firsts, seconds = rerank.pairs_of(packed)
        found, nums_first = list[bytes](), list[int]()
        for first, second in zip(itertools.cycle(firsts), seconds, strict=False):
            token_ids, num_first = model.tokenizer.encode_pair(first, second)
            found.append(token_ids.tobytes())
            nums_first.append(num_first)
            if len(token_ids) > job.longest:
                break
        return Encoded(tuple(found), nums_first=tuple(nums_first))

    def rank(self, job: worker_jobs.RankDocuments, packed: bytes) -> bytes:
        """Return the ranking as JSON, for the field `results`."""
        scores = self._relevance(job, packed)
        return rerank.ranking(packed, scores, job.top_n, job.shows_documents)

    def _relevance(
        self, job: worker_jobs.RankDocuments | worker_jobs.WriteScores, packed: bytes
    ) -> "array[float]":
        """Return one score per packed pair of texts."""
        num = len(rerank.pairs_of(packed)[1])
        is_logit = self._texts.get(job.model).model.sentences.score_is_logit
        return rerank.relevance(job.vectors, num, is_logit)

    def tokenize(self, body: bytes, max_model_len: Mapping[str, int]) -> bytes:
        model, fields = self._read(body, TOKENIZE)
        sources = [name for name in _SOURCES if name in fields]
        if len(sources) != 1:
            message = f"Send exactly one of {', '.join(_SOURCES)}; {len(sources)} were sent."
            code = "invalid_value" if sources else "missing_required_parameter"
            raise RequestError(code, message, sources[1] if sources else "content")
        if not fields.get("parse_special", True):
            message = "parse_special: false is not supported here; leave it out."
            raise RequestError("unsupported_parameter", message, "parse_special")
        token_ids = ids_of(model, _to_prompt(fields), self._texts.rendering).token_ids.tolist()
        longest = max_model_len.get(model.names[0], model.max_model_len)
        return encode(listed_tokens(model, token_ids, fields) | {"max_model_len": longest})

    def _detokenize(self, body: bytes) -> bytes:
        model, fields = self._read(body, DETOKENIZE, "tokens")
        check_token_ids(fields["tokens"], "tokens", model.vocab_size)
        text = model.tokenizer.decode(fields["tokens"], False)
        return encode({"content": text, "prompt": text})

    def apply_template(self, body: bytes) -> bytes:
        model, fields = self._read(body, APPLY_TEMPLATE, "messages")
        if model.prefills_assistant:
            openai_chat.prefill(fields)
        rendered = render(model, openai_chat.read_chat(fields), self._texts.rendering)
        return encode({"prompt": rendered.text})

    def _read(
        self, body: bytes, table: Mapping[str, Kind], required: str | None = None
    ) -> tuple[TextModel, dict[str, Any]]:
        given = decode(body)
        with self._texts.noting(given):
            if required and given.get(required) is None:
                raise missing(required)
            fields = read_fields(table, given)
            refuse_images(fields.get("messages", ()), "this route takes text only")
        return self._texts.get(fields.get("model")).model, fields


def _is_whole(checked: CheckedBody) -> bool:
    """Whether the prompt needs no image, no earlier response and no infill marks."""
    continues = not checked.fields.keys().isdisjoint(("previous_response_id", "conversation"))
    return not continues and not any(
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
    # The server may exit while a job runs.
    with contextlib.suppress(ConnectionError):
        _work(socket.socket(fileno=int(sys.argv[1])), is_for_images=IMAGES in sys.argv[2:])
    # A normal exit would first free all modules, which takes a while.
    os._exit(0)


def _work(connection: socket.socket, is_for_images: bool) -> None:
    start = receive(connection)
    if start is None:
        return
    # Import all dialects now, so that no job has to wait for an import.
    for route in DIALECTS:
        dialect_of(route)
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
        # Streams take precedence over the preparation of images.
        os.nice(19)
    # If there is only one model, load it before the first job, because jobs will need it.
    if len(texts) == 1:
        # Each job that needs the model reports a failed load.
        with contextlib.suppress(RequestError):
            _ = texts[0].image_processor if is_for_images else texts[0].grammars
    bound.set()
    reply(connection, b"")
    while (job := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_VIRTUAL, JOB_S)
        _answer(connection, own, *job)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # Free the job before receiving the next job, which may be just as large.
        del job
        if bound.is_near:
            # Exit to return memory that the allocator cannot give back piece by piece.
            return


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
    """Limit the time of a template with a timer of the operating system.

    Nothing else can interrupt a template that spends minutes in a single call.
    """
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
