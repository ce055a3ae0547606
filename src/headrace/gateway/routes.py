"""Owns the table of routes: for the application, for its guards, and for the OpenAPI document."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.batches.answers import LineAnswers
from headrace.batches.batches import Batches
from headrace.batches.shelf import Shelf
from headrace.gateway import adapter_routes
from headrace.gateway.adapter_routes import AdapterRoutes
from headrace.gateway.auth import Auth, Endpoint
from headrace.gateway.batch_routes import BatchRoutes
from headrace.gateway.bodies import Bodies
from headrace.gateway.body_index import BodyIndex
from headrace.gateway.byte_routes import ByteRoutes
from headrace.gateway.durable_routes import DurableRoutes
from headrace.gateway.file_routes import FileRoutes
from headrace.gateway.generation_routes import GenerationRoutes, TextRoutes
from headrace.gateway.http_responses import answer
from headrace.gateway.llama_routes import LlamaRoutes
from headrace.gateway.message_batch_routes import MessageBatchRoutes
from headrace.gateway.model_routes import ModelRoutes
from headrace.gateway.native_routes import NativeRoutes
from headrace.gateway.ollama_routes import NAMED, PULL, OllamaRoutes
from headrace.gateway.openapi import EITHER_ERROR, EVENTS, JSON, Operation, document
from headrace.gateway.realtime import RealtimeSockets
from headrace.gateway.responses_routes import ResponsesRoutes
from headrace.gateway.state_routes import ManageRoutes, StateRoutes
from headrace.gateway.vector_routes import VectorRoutes
from headrace.generation.generation import Generation
from headrace.intake.intake import Intake
from headrace.intake.vectors import ONE
from headrace.protocols import batch_lines, body_names, worker
from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.dialect import DIALECTS, Dialect, dialect_of
from headrace.protocols.fields.kinds import Kind, String
from headrace.protocols.framing import LINES
from headrace.protocols.ollama import answers as ollama_answers
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.vectors import embeddings, rerank
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError

_PUT_OFF = ("server_overloaded", "rate_limit_exceeded", "request_timeout")
"""Errors to which some dialects give a status of their own."""


class ForeignRoutes(NamedTuple):
    """Routes by which other servers' clients ask what there is."""

    llama: LlamaRoutes
    ollama: OllamaRoutes


class RoutesOfModels(NamedTuple):
    """Routes by which clients load models, and an operator sets them and their adapters."""

    asked: ModelRoutes
    desired: ModelRoutes
    adapters: AdapterRoutes


class LaterRoutes(NamedTuple):
    """Routes of what is answered later, and what answers it."""

    files: FileRoutes
    batches: BatchRoutes
    messages: MessageBatchRoutes
    work: Batches


class Endpoints:
    """The objects whose methods answer, over one generation; each route is one of their methods."""

    def __init__(
        self, generation: Generation, config: ServerConfig, auth: Auth, shelf: Shelf
    ) -> None:
        self._prefix = config.http.api_prefix
        bodies, of_operators = (
            Bodies(config.http.max_body_bytes, config.http.body_timeout_s, auth.check_simple)
            for _ in range(2)
        )
        index, intake = BodyIndex(), Intake(generation, config)
        self.states = StateRoutes(generation, config.http)
        self.manages = ManageRoutes(generation)
        self.models = RoutesOfModels(
            ModelRoutes(generation, bodies),
            ModelRoutes(generation, of_operators),
            AdapterRoutes(generation, of_operators),
        )
        self.generates = GenerationRoutes(generation, intake, config, auth, bodies)
        self.vectors = VectorRoutes(generation, intake, auth, bodies)
        self.texts = TextRoutes(generation, intake, bodies)
        self.responses = ResponsesRoutes(generation, intake, config, auth, bodies)
        self.native = NativeRoutes(generation, config, auth, index)
        self.by_byte = ByteRoutes(generation, config, auth, bodies, index)
        self.durable = DurableRoutes(generation, auth, config.streams.heartbeat_s)
        self.foreign = ForeignRoutes(
            LlamaRoutes(generation, auth), OllamaRoutes(generation, bodies)
        )
        answers = LineAnswers(generation, intake)
        work, pause_s = generation.work, config.http.body_timeout_s
        batches = Batches(shelf, config, work, answers)
        self.later = LaterRoutes(
            FileRoutes(batches, shelf.blobs, auth, pause_s),
            BatchRoutes(batches, work, auth, bodies),
            MessageBatchRoutes(batches, shelf, intake, auth, bodies, self._prefix),
            batches,
        )
        self.sockets = RealtimeSockets(generation, config, auth, bodies, intake)

    async def openapi(self, request: Request) -> ASGIApp:
        return answer(document(ROUTES, self._prefix))


def _everybody(auth: Auth, endpoint: Endpoint) -> Endpoint:
    return endpoint


class _Lenient(msgspec.Struct, frozen=True):
    """A field of a route that skips what it does not understand."""

    description: str

    def check(self, value: Any, path: str) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {"description": self.description}


ANY, KEY, OPERATOR, ADMIN = _everybody, Auth.guard, Auth.guard_operator, Auth.guard_admin
_BODY_ERRORS = (400, 404, 408, 413, 415)
_ENGINE_ERRORS = (409, 500, 503)
_LOOKUP: Mapping[str, Kind] = {"conversation_ids": _Lenient("Up to 1,000 strings")}
_DOCUMENT: Mapping[str, Kind] = {"models": _Lenient("Objects with the settings of [[models]]")}
_STREAM = ("id", "object", "state", "mode", "durable", "last_seq", "total_bytes", "created")
_FILE = ("id", "object", "bytes", "created_at", "filename", "purpose")
_LIST = ("object", "data", "has_more")
_BATCH = ("id", "object", "endpoint", "status", "input_file_id", "request_counts")
_MESSAGE_BATCH = ("id", "type", "processing_status", "request_counts", "created_at")
_SPAN = ("from", "stream_id")
_OLLAMA_ERROR: str = ollama_answers.ERRORS.SCHEMA["title"]
_MESSAGES_ERROR: str = anthropic_messages.ERRORS.SCHEMA["title"]


def generates(route: str, dialect: Dialect) -> Operation:
    """The route of a dialect."""
    errors = dialect.ERRORS
    put_off = {errors.status(RequestError(code, "")) for code in _PUT_OFF}
    return Operation(
        "post", route, KEY, lambda on: on.generates.generate,
        dialect.SUMMARY, dialect.KEYS, dialect.TABLE, dialect.REQUIRED, reads_common_fields=True,
        headers=("X-Conversation-Id", "Idempotency-Key"),
        media=(JSON, dialect.FRAMING.MEDIA_TYPE),
        errors=(*_BODY_ERRORS, *_ENGINE_ERRORS, *sorted(put_off)),
        error=errors.SCHEMA["title"],
        auth_error=errors.SCHEMA["title"],
    )  # fmt: skip


# fmt: off
ROUTES: tuple[Operation, ...] = (
    Operation("get", "/health", ANY, lambda on: on.states.health,
        "Whether requests are served", ("status",), errors=(503,)),
    Operation("get", "/v1/health", ANY, lambda on: on.states.health,
        "Whether requests are served", ("status",), errors=(503,)),
    Operation("get", "/health/live", ANY, lambda on: on.states.live,
        "Whether the process answers", ("status",)),
    Operation("get", "/v1/models", KEY, lambda on: on.states.models,
        "Every served name; with Anthropic-Version, in the shape of Anthropic's API", ("data",),
        query=("limit", "after_id", "before_id"), headers=("Anthropic-Version",), errors=(400,),
        error=EITHER_ERROR, auth_error=EITHER_ERROR),
    Operation("get", "/v1/models/{id:path}", KEY, lambda on: on.states.model,
        "One served name; with Anthropic-Version, in the shape of Anthropic's API", ("id",),
        headers=("Anthropic-Version",), errors=(404,),
        error=EITHER_ERROR, auth_error=EITHER_ERROR),
    Operation("get", "/models", KEY, lambda on: on.models.asked.models,
        "Every model, with its state", ("object", "data", "models")),
    Operation("get", "/models/sse", KEY, lambda on: on.models.asked.events,
        "Every change of that list", media=(EVENTS,)),
    Operation("post", "/models", OPERATOR, lambda on: on.models.asked.pull,
        "Download a model, and serve it", ("success",), body_names.MODEL, ("model",),
        errors=(*_BODY_ERRORS, 403, 429, 500)),
    Operation("delete", "/models", OPERATOR, lambda on: on.models.asked.delete,
        "Stop a download, or delete a model that came by one", ("success",), query=("model",),
        errors=(400, 404)),
    Operation("post", "/models/load", KEY, lambda on: on.models.asked.load,
        "Load a model", ("success",), body_names.MODEL, ("model",), errors=(*_BODY_ERRORS, 500)),
    Operation("post", "/models/unload", OPERATOR, lambda on: on.models.asked.unload,
        "Unload a model once its streams end", ("success",), body_names.MODEL, ("model",),
        errors=(*_BODY_ERRORS, 500)),
    Operation("post", "/v1/load_lora_adapter", OPERATOR, lambda on: on.models.adapters.load,
        "Load an adapter (LoRA), to be asked for as a model", table=adapter_routes.LOADED,
        required=("lora_name", "lora_path"), media=("text/plain",),
        errors=(*_BODY_ERRORS, *_ENGINE_ERRORS)),
    Operation("post", "/v1/unload_lora_adapter", OPERATOR, lambda on: on.models.adapters.unload,
        "Unload an adapter once its streams end", table=adapter_routes.NAMED,
        required=("lora_name",), media=("text/plain",), errors=_BODY_ERRORS),
    Operation("get", "/props", KEY, lambda on: on.foreign.llama.props,
        "A model's settings", ("default_generation_settings",),
        query=("model",), errors=(404, 500)),
    Operation("get", "/tokenizer_info", KEY, lambda on: on.foreign.llama.tokenizer_info,
        "A tokenizer's special tokens, as vLLM shows them", ("tokenizer_class", "chat_template"),
        query=("model",), errors=(404, 500)),
    Operation("get", "/slots", KEY, lambda on: on.foreign.llama.slots,
        "What runs, as llama.cpp shows it", query=("fail_on_no_slot", "model"), errors=(404, 503)),
    Operation("get", "/metrics", ADMIN, lambda on: on.states.metrics,
        "Figures for Prometheus", media=("text/plain",)),
    Operation("get", "/openapi.json", KEY, lambda on: on.openapi,
        "This document", ("openapi", "paths")),
    Operation("get", "/manage/state", ADMIN, lambda on: on.manages.state,
        "How the server is doing", ("state", "engine", "steps")),
    Operation("get", "/manage/stream", ADMIN, lambda on: on.manages.stream,
        "The same, again after each change", media=(EVENTS,)),
    Operation("get", "/manage/live", ADMIN, lambda on: on.manages.figures.live,
        "Rates and waits of this moment", ("live", "models", "gateways"),
        query=("model",), errors=(404,)),
    Operation("get", "/manage/history", ADMIN, lambda on: on.manages.figures.history,
        "Rates and waits of the last hour", ("every_s", "points"),
        query=("model",), errors=(404,)),
    Operation("get", "/manage/desired", ADMIN, lambda on: on.models.desired.desired,
        "The configured models", tuple(_DOCUMENT), errors=(400,)),
    Operation("put", "/manage/desired", ADMIN, lambda on: on.models.desired.put_desired,
        "Replace the configured models", tuple(_DOCUMENT), _DOCUMENT, tuple(_DOCUMENT),
        errors=(400, 408, 413, 415, 500)),
    Operation("post", "/manage/drain", ADMIN, lambda on: on.manages.drain,
        "Admit nothing more", ("status", "streams")),
    Operation("post", "/manage/replicas/replace", ADMIN, lambda on: on.manages.replace,
        "Put a fresh engine in the place of one of several", ("status",),
        query=("model", "replica"), errors=(400, 404)),
    Operation("delete", "/manage/drain", ADMIN, lambda on: on.manages.admit_again,
        "Admit requests again", ("status", "streams")),
    *(generates(route, dialect_of(route)) for route in DIALECTS),
    Operation("get", "/api/version", KEY, lambda on: on.foreign.ollama.version,
        "The version, as Ollama's API", ("version",), auth_error=_OLLAMA_ERROR),
    Operation("get", "/api/tags", KEY, lambda on: on.foreign.ollama.tags,
        "Every model, as Ollama's API", ("models",), auth_error=_OLLAMA_ERROR),
    Operation("get", "/api/ps", KEY, lambda on: on.foreign.ollama.running,
        "Models in memory, as Ollama's API", ("models",), auth_error=_OLLAMA_ERROR),
    Operation("post", "/api/show", KEY, lambda on: on.foreign.ollama.show,
        "One model, as Ollama's API", ("details", "model_info", "capabilities"),
        body_names.MODEL, ("model",), errors=(*_BODY_ERRORS, 500),
        error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", "/api/pull", OPERATOR, lambda on: on.foreign.ollama.pull,
        "Download a model, as Ollama's API", ("status",), PULL, media=(JSON, LINES.MEDIA_TYPE),
        errors=(*_BODY_ERRORS, 403, 429, 500), error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("delete", "/api/delete", OPERATOR, lambda on: on.foreign.ollama.delete,
        "Delete a model that was downloaded, as Ollama's API", table=NAMED, media=(),
        errors=_BODY_ERRORS, error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", "/api/embed", KEY, lambda on: on.vectors.embed_bare,
        "One vector for each input, as Ollama's API", ("model", "embeddings"),
        {**embeddings.TABLE, "input": embeddings.Inputs(least=0)}, reads_common_fields=True,
        errors=_BODY_ERRORS + _ENGINE_ERRORS,
        error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", ONE, KEY, lambda on: on.vectors.embed_one,
        "The vector of one prompt, as in Ollama's older API", ("embedding",),
        {"model": embeddings.TABLE["model"], "prompt": String()},
        errors=_BODY_ERRORS + _ENGINE_ERRORS, error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", embeddings.ROUTE, KEY, lambda on: on.vectors.embed,
        "One vector for each input", embeddings.KEYS, embeddings.TABLE, embeddings.REQUIRED,
        reads_common_fields=True, errors=_BODY_ERRORS + _ENGINE_ERRORS),
    *(Operation("post", route, KEY, lambda on: on.vectors.rerank,
        "Documents by their relevance to a query", rerank.KEYS, rerank.TABLE, rerank.REQUIRED,
        reads_common_fields=True, errors=_BODY_ERRORS + _ENGINE_ERRORS) for route in rerank.ROUTES),
    Operation("post", "/v1/messages/count_tokens", KEY, lambda on: on.texts.count_tokens,
        "How many tokens a message would have", ("input_tokens",),
        anthropic_messages.COUNTED, anthropic_messages.COUNTED_REQUIRED,
        errors=_BODY_ERRORS, error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("post", "/tokenize", KEY, lambda on: on.texts.tokenize,
        "Text to token ids", ("tokens", "count", "max_model_len"), worker.TOKENIZE,
        errors=_BODY_ERRORS),
    Operation("post", "/detokenize", KEY, lambda on: on.texts.detokenize,
        "Token ids to text", ("content", "prompt"), worker.DETOKENIZE, ("tokens",),
        errors=_BODY_ERRORS),
    Operation("post", "/apply-template", KEY, lambda on: on.texts.apply_template,
        "The text of a conversation", ("prompt",), worker.APPLY_TEMPLATE, ("messages",),
        errors=_BODY_ERRORS),
    Operation("post", "/v1/responses/input_tokens", KEY, lambda on: on.responses.input_tokens,
        "The length of a prompt", ("object", "input_tokens"),
        openai_responses.TABLE, openai_responses.REQUIRED, errors=_BODY_ERRORS),
    Operation("get", "/v1/responses/{id}", KEY, lambda on: on.responses.read,
        "A response as it stands", openai_responses.KEYS,
        query=("stream", "starting_after"), media=(JSON, EVENTS), errors=(400, 404)),
    Operation("delete", "/v1/responses/{id}", KEY, lambda on: on.responses.delete,
        "Stop and forget a response", ("id", "object", "deleted"), errors=(404,)),
    Operation("post", "/v1/responses/{id}/cancel", KEY, lambda on: on.responses.cancel,
        "Stop a response", openai_responses.KEYS, errors=(404,)),
    Operation("get", "/v1/responses/{id}/input_items", KEY, lambda on: on.responses.input_items,
        "What led to a response", ("object", "data", "has_more"),
        query=("limit", "order", "after"), errors=(400, 404)),
    Operation("post", "/v1/files", KEY, lambda on: on.later.files.create,
        "Send a file of lines, as a form", _FILE, errors=(400, 408, 413, 415, 503)),
    Operation("get", "/v1/files", KEY, lambda on: on.later.files.list,
        "The files of a key", _LIST, query=("purpose", "limit", "order", "after"), errors=(400,)),
    Operation("get", "/v1/files/{id}", KEY, lambda on: on.later.files.read,
        "One file", _FILE, errors=(404,)),
    Operation("delete", "/v1/files/{id}", KEY, lambda on: on.later.files.delete,
        "Delete a file", ("id", "object", "deleted"), errors=(400, 404, 503)),
    Operation("get", "/v1/files/{id}/content", KEY, lambda on: on.later.files.content,
        "The bytes of a file", media=("application/octet-stream",), errors=(404,)),
    Operation("post", "/v1/batches", KEY, lambda on: on.later.batches.create,
        "Answer the lines of a file from what others leave", _BATCH,
        batch_lines.BATCH_FIELDS, batch_lines.BATCH_REQUIRED, errors=(*_BODY_ERRORS, 500, 503)),
    Operation("get", "/v1/batches", KEY, lambda on: on.later.batches.list,
        "The batches of a key", _LIST, query=("limit", "after"), errors=(400,)),
    Operation("get", "/v1/batches/{id}", KEY, lambda on: on.later.batches.read,
        "How a batch stands", _BATCH, errors=(404,)),
    Operation("post", "/v1/batches/{id}/cancel", KEY, lambda on: on.later.batches.cancel,
        "Answer no further lines", _BATCH, errors=(404, 503)),
    Operation("post", "/v1/messages/batches", KEY, lambda on: on.later.messages.create,
        "Answer many messages from what others leave", _MESSAGE_BATCH,
        batch_lines.REQUESTS_FIELDS, batch_lines.REQUESTS_REQUIRED,
        errors=(*_BODY_ERRORS, 500, 503), error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/messages/batches", KEY, lambda on: on.later.messages.list,
        "The batches of messages of a key", ("data", "has_more", "first_id", "last_id"),
        query=("limit", "after_id", "before_id"), errors=(400,),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/messages/batches/{id}", KEY, lambda on: on.later.messages.read,
        "How a batch of messages stands", _MESSAGE_BATCH, errors=(404,),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("post", "/v1/messages/batches/{id}/cancel", KEY,
        lambda on: on.later.messages.cancel, "Answer no further messages", _MESSAGE_BATCH,
        errors=(404, 503), error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("delete", "/v1/messages/batches/{id}", KEY, lambda on: on.later.messages.delete,
        "Forget an ended batch of messages", ("id", "type"), errors=(400, 404, 503),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/messages/batches/{id}/results", KEY,
        lambda on: on.later.messages.results, "The results, a line each",
        media=("application/x-jsonl",), errors=(400, 404),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/streams/{id}", KEY, lambda on: on.native.state,
        "How a stream stands", _STREAM, errors=(404,)),
    Operation("get", "/v1/streams/{id}/events", KEY, lambda on: on.native.events,
        "The events of a stream from a cursor on; 204 if it has ended there",
        query=("after", "view", "limit", "wait"), headers=("Last-Event-ID",),
        media=(EVENTS, LINES.MEDIA_TYPE, JSON), errors=(400, 404)),
    Operation("post", "/v1/streams/{id}/cancel", KEY, lambda on: on.native.cancel,
        "Stop a stream", _STREAM, errors=(404,)),
    Operation("delete", "/v1/streams/{id}", KEY, lambda on: on.native.delete,
        "Stop and forget", status=204, media=()),
    Operation("get", "/v1/durable/{id}", KEY, lambda on: on.durable.read,
        "A stream by the protocol Durable Streams 1.0", query=("offset", "live", "cursor"),
        headers=("If-None-Match",), media=(JSON, EVENTS), errors=(400, 404, 410)),
    Operation("get", "/v1/stream", KEY, lambda on: on.by_byte.read,
        "The body of a POST from a byte on", query=("conv_id", *_SPAN),
        media=(EVENTS, LINES.MEDIA_TYPE, JSON), errors=(400, 404, 416), error="ByteError"),
    Operation("get", "/v1/stream/{id:path}", KEY, lambda on: on.by_byte.read,
        "The body of a POST from a byte on", query=_SPAN,
        media=(EVENTS, LINES.MEDIA_TYPE, JSON), errors=(400, 404, 416), error="ByteError"),
    Operation("delete", "/v1/stream", KEY, lambda on: on.by_byte.delete,
        "Stop and forget", query=("conv_id",), status=204, media=(), errors=(400,),
        error="ByteError"),
    Operation("delete", "/v1/stream/{id:path}", KEY, lambda on: on.by_byte.delete,
        "Stop and forget", status=204, media=(), errors=(400,), error="ByteError"),
    Operation("post", "/v1/streams/lookup", KEY, lambda on: on.by_byte.lookup,
        "Which conversations have a stream", table=_LOOKUP,
        errors=(400, 408, 413, 415), error="ByteError"),
)
# fmt: on
"""One method of one path a row, in the order of the document; no two rows match one request."""
