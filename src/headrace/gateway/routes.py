"""Holds the table of routes, which the application and the OpenAPI document use."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway import adapter_routes, lm_studio_routes
from headrace.gateway.adapter_routes import AdapterRoutes
from headrace.gateway.auth import Auth
from headrace.gateway.batch_routes import BatchRoutes
from headrace.gateway.byte_routes import ByteRoutes
from headrace.gateway.conversation_routes import ConversationRoutes
from headrace.gateway.durable_routes import DurableRoutes
from headrace.gateway.file_routes import FileRoutes
from headrace.gateway.generation_routes import GenerationRoutes, TextRoutes
from headrace.gateway.http_responses import answer
from headrace.gateway.llama_routes import LlamaRoutes
from headrace.gateway.lm_studio_routes import LmStudioRoutes
from headrace.gateway.message_batch_routes import MessageBatchRoutes
from headrace.gateway.model_routes import ModelRoutes
from headrace.gateway.native_routes import NativeRoutes
from headrace.gateway.ollama_routes import NAME_FIELDS, PULL_FIELDS, OllamaRoutes
from headrace.gateway.openapi import EITHER_ERROR, EVENTS, JSON, Endpoint, Operation, document
from headrace.gateway.realtime import RealtimeSockets
from headrace.gateway.responses_routes import ResponsesRoutes
from headrace.gateway.responses_socket import ResponseSockets
from headrace.gateway.state_routes import ManageRoutes, StateRoutes
from headrace.gateway.vector_routes import VectorRoutes
from headrace.intake.vectors import ONE
from headrace.protocols import batch_lines, body_names, worker
from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.dialect import DIALECTS, Dialect, dialect_of
from headrace.protocols.fields.kinds import Kind, String
from headrace.protocols.framing import LINES
from headrace.protocols.ollama import answers as ollama_answers
from headrace.protocols.openai import conversations
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.vectors import embeddings, rerank, score
from headrace_common.errors import RequestError

_PUT_OFF = ("server_overloaded", "rate_limit_exceeded", "request_timeout")
"""Errors for which some dialects use a different status."""


class Endpoints(NamedTuple):
    """Holds the objects whose methods answer requests. Each route leads to one method."""

    states: StateRoutes
    management: ManageRoutes
    models: ModelRoutes
    configured: ModelRoutes
    adapters: AdapterRoutes
    generation: GenerationRoutes
    vectors: VectorRoutes
    texts: TextRoutes
    responses: ResponsesRoutes
    conversations: ConversationRoutes
    streams: NativeRoutes
    stream_bytes: ByteRoutes
    durable: DurableRoutes
    llama: LlamaRoutes
    ollama: OllamaRoutes
    lm_studio: LmStudioRoutes
    files: FileRoutes
    batches: BatchRoutes
    message_batches: MessageBatchRoutes
    sockets: RealtimeSockets
    response_sockets: ResponseSockets
    prefix: str

    async def openapi(self, request: Request) -> ASGIApp:
        return answer(document(ROUTES, self.prefix))


class _LenientField(msgspec.Struct, frozen=True):
    """A field with parts that the route may not understand; such parts are skipped."""

    description: str

    def check(self, value: Any, path: str) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {"description": self.description}


ANY, KEY, OPERATOR, ADMIN = None, Auth.check, Auth.check_operator, Auth.check_admin
_BODY_ERRORS = (400, 404, 408, 413, 415)
_ENGINE_ERRORS = (409, 500, 503)
_LOOKUP: Mapping[str, Kind] = {"conversation_ids": _LenientField("Up to 1,000 strings")}
_DOCUMENT: Mapping[str, Kind] = {"models": _LenientField("Objects with the settings of [[models]]")}
_STREAM = ("id", "object", "state", "mode", "durable", "last_seq", "total_bytes", "created")
_FILE = ("id", "object", "bytes", "created_at", "filename", "purpose")
_LIST = ("object", "data", "has_more")
_BATCH = ("id", "object", "endpoint", "status", "input_file_id", "request_counts")
_MESSAGE_BATCH = ("id", "type", "processing_status", "request_counts", "created_at")
_SPAN = ("from", "stream_id")
_OLLAMA_ERROR: str = ollama_answers.ERRORS.SCHEMA["title"]
_MESSAGES_ERROR: str = anthropic_messages.ERRORS.SCHEMA["title"]

_OWN_ENDPOINTS: Mapping[str, Callable[[Endpoints], Endpoint]] = {
    "/api/chat": lambda on: on.ollama.generate,
    "/api/generate": lambda on: on.ollama.generate,
}
"""The endpoints of routes that do more than open a stream. The keys are routes of dialects."""


def generation_route(route: str, dialect: Dialect) -> Operation:
    """Describe the route of a dialect."""
    endpoint = _OWN_ENDPOINTS.get(route, lambda on: on.generation.generate)
    errors = dialect.ERRORS
    put_off = {errors.status(RequestError(code, "")) for code in _PUT_OFF}
    return Operation(
        "post", route, KEY, endpoint,
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
        "Report whether the server accepts requests", ("status",), errors=(503,)),
    Operation("get", "/v1/health", ANY, lambda on: on.states.health,
        "Report whether the server accepts requests", ("status",), errors=(503,)),
    Operation("get", "/health/live", ANY, lambda on: on.states.live,
        "Report whether the process runs", ("status",)),
    *(Operation(method, "/ping", ANY, lambda on: on.states.health,
        "Report to SageMaker whether the server accepts requests", ("status",),
        errors=(503,)) for method in ("get", "post")),
    Operation("get", "/version", ANY, lambda on: on.states.version,
        "Show the version, as vLLM does", ("version",)),
    Operation("get", "/v1/models", KEY, lambda on: on.states.models,
        "List all served names; in Anthropic's format if Anthropic-Version is sent", ("data",),
        query=("limit", "after_id", "before_id"), headers=("Anthropic-Version",), errors=(400,),
        error=EITHER_ERROR, auth_error=EITHER_ERROR),
    Operation("get", "/v1/models/{id:path}", KEY, lambda on: on.states.model,
        "Show one served name; in Anthropic's format if Anthropic-Version is sent", ("id",),
        headers=("Anthropic-Version",), errors=(404,),
        error=EITHER_ERROR, auth_error=EITHER_ERROR),
    Operation("get", "/models", KEY, lambda on: on.models.models,
        "List all models with their states", ("object", "data", "models")),
    Operation("get", "/models/available", KEY, lambda on: on.models.available,
        "List models that can be downloaded by a short name", ("data", "memory_bytes")),
    Operation("get", "/models/sse", KEY, lambda on: on.models.events,
        "Send each change of the list of models", media=(EVENTS,)),
    Operation("post", "/models", OPERATOR, lambda on: on.models.pull,
        "Download a model, and serve it", ("success",), body_names.MODEL, ("model",),
        errors=(*_BODY_ERRORS, 403, 429, 500)),
    Operation("delete", "/models", OPERATOR, lambda on: on.models.delete,
        "Stop a download, or delete a downloaded model", ("success",), query=("model",),
        errors=(400, 404)),
    Operation("post", "/models/load", KEY, lambda on: on.models.load,
        "Load a model", ("success",), body_names.MODEL, ("model",), errors=(*_BODY_ERRORS, 500)),
    Operation("post", "/models/unload", OPERATOR, lambda on: on.models.unload,
        "Unload a model once its streams end", ("success",), body_names.MODEL, ("model",),
        errors=(*_BODY_ERRORS, 500)),
    Operation("post", "/v1/load_lora_adapter", OPERATOR, lambda on: on.adapters.load,
        "Load a LoRA adapter; requests name the adapter as their model",
        table=adapter_routes.LOAD_FIELDS, required=("lora_name", "lora_path"),
        media=("text/plain",),
        errors=(*_BODY_ERRORS, *_ENGINE_ERRORS)),
    Operation("post", "/v1/unload_lora_adapter", OPERATOR, lambda on: on.adapters.unload,
        "Unload an adapter once its streams end", table=adapter_routes.UNLOAD_FIELDS,
        required=("lora_name",), media=("text/plain",), errors=_BODY_ERRORS),
    Operation("get", "/props", KEY, lambda on: on.llama.props,
        "Show the settings of a model", ("default_generation_settings",),
        query=("model",), errors=(404, 500)),
    Operation("get", "/tokenizer_info", KEY, lambda on: on.llama.tokenizer_info,
        "List a tokenizer's special tokens, as vLLM does", ("tokenizer_class", "chat_template"),
        query=("model",), errors=(404, 500)),
    Operation("get", "/slots", KEY, lambda on: on.llama.slots,
        "List slots and running requests, as llama.cpp does",
        query=("fail_on_no_slot", "model"), errors=(404, 503)),
    Operation("get", "/metrics", ADMIN, lambda on: on.states.metrics,
        "Show metrics for Prometheus", media=("text/plain",)),
    Operation("get", "/openapi.json", KEY, lambda on: on.openapi,
        "Describe all routes with OpenAPI", ("openapi", "paths")),
    Operation("get", "/manage/state", ADMIN, lambda on: on.management.state,
        "Show the state of models, engines and requests", ("state", "engine", "steps")),
    Operation("get", "/manage/stream", ADMIN, lambda on: on.management.stream,
        "Send the state again after each change", media=(EVENTS,)),
    Operation("get", "/manage/live", ADMIN, lambda on: on.management.figures.live,
        "Show current rates and waits", ("live", "models", "gateways"),
        query=("model",), errors=(404,)),
    Operation("get", "/manage/history", ADMIN, lambda on: on.management.figures.history,
        "Show rates and waits of the last hour", ("every_s", "points"),
        query=("model",), errors=(404,)),
    Operation("get", "/manage/desired", ADMIN, lambda on: on.configured.desired,
        "Show the configured models", tuple(_DOCUMENT), errors=(400,)),
    Operation("put", "/manage/desired", ADMIN, lambda on: on.configured.put_desired,
        "Replace the configured models", tuple(_DOCUMENT), _DOCUMENT, tuple(_DOCUMENT),
        errors=(400, 408, 413, 415, 500)),
    Operation("post", "/manage/drain", ADMIN, lambda on: on.management.drain,
        "Stop admitting requests", ("status", "streams")),
    Operation("post", "/manage/replicas/replace", ADMIN, lambda on: on.management.replace,
        "Replace one engine of a model that has several", ("status",),
        query=("model", "replica"), errors=(400, 404)),
    Operation("delete", "/manage/drain", ADMIN, lambda on: on.management.admit_again,
        "Admit requests again", ("status", "streams")),
    *(generation_route(route, dialect_of(route)) for route in DIALECTS),
    Operation("get", "/api/version", KEY, lambda on: on.ollama.version,
        "Show the version, as Ollama does", ("version",), auth_error=_OLLAMA_ERROR),
    Operation("get", "/api/tags", KEY, lambda on: on.ollama.tags,
        "List all models, as Ollama does", ("models",), auth_error=_OLLAMA_ERROR),
    Operation("get", "/api/ps", KEY, lambda on: on.ollama.running,
        "List models in memory, as Ollama does", ("models",), auth_error=_OLLAMA_ERROR),
    Operation("get", "/api/v0/models", KEY, lambda on: on.lm_studio.models,
        "List all models, as LM Studio does", ("object", "data"), auth_error=_OLLAMA_ERROR),
    Operation("get", "/api/v0/models/{id:path}", KEY, lambda on: on.lm_studio.model,
        "Show one model, as LM Studio does", lm_studio_routes.KEYS, errors=(404,),
        error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", "/api/show", KEY, lambda on: on.ollama.show,
        "Show one model, as Ollama does", ("details", "model_info", "capabilities"),
        body_names.MODEL, ("model",), errors=(*_BODY_ERRORS, 500),
        error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", "/api/pull", OPERATOR, lambda on: on.ollama.pull,
        "Download a model, as Ollama does", ("status",), PULL_FIELDS,
        media=(JSON, LINES.MEDIA_TYPE), errors=(*_BODY_ERRORS, 403, 429, 500),
        error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("delete", "/api/delete", OPERATOR, lambda on: on.ollama.delete,
        "Delete a downloaded model, as Ollama does", table=NAME_FIELDS, media=(),
        errors=_BODY_ERRORS, error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", "/api/embed", KEY, lambda on: on.vectors.embed_bare,
        "Embed each input, as Ollama does", ("model", "embeddings"),
        {**embeddings.TABLE, "input": embeddings.Inputs(least=0)}, reads_common_fields=True,
        errors=_BODY_ERRORS + _ENGINE_ERRORS,
        error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", ONE, KEY, lambda on: on.vectors.embed_one,
        "Embed one prompt, as Ollama's older API does", ("embedding",),
        {"model": embeddings.TABLE["model"], "prompt": String()},
        errors=_BODY_ERRORS + _ENGINE_ERRORS, error=_OLLAMA_ERROR, auth_error=_OLLAMA_ERROR),
    Operation("post", embeddings.ROUTE, KEY, lambda on: on.vectors.embed,
        "Embed each input", embeddings.KEYS, embeddings.TABLE, embeddings.REQUIRED,
        reads_common_fields=True, errors=_BODY_ERRORS + _ENGINE_ERRORS),
    *(Operation("post", route, KEY, lambda on: on.vectors.pairs,
        "Rank documents by relevance to a query", rerank.KEYS, rerank.TABLE, rerank.REQUIRED,
        reads_common_fields=True, errors=_BODY_ERRORS + _ENGINE_ERRORS) for route in rerank.ROUTES),
    *(Operation("post", route, KEY, lambda on: on.vectors.pairs,
        "Score pairs of texts, as vLLM does", score.KEYS, score.TABLE, score.REQUIRED,
        reads_common_fields=True, errors=_BODY_ERRORS + _ENGINE_ERRORS) for route in score.ROUTES),
    Operation("post", "/v1/messages/count_tokens", KEY, lambda on: on.texts.count_tokens,
        "Count the tokens of a conversation", ("input_tokens",),
        anthropic_messages.COUNTED, anthropic_messages.COUNTED_REQUIRED,
        errors=_BODY_ERRORS, error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("post", "/tokenize", KEY, lambda on: on.texts.tokenize,
        "Convert text to token ids", ("tokens", "count", "max_model_len"), worker.TOKENIZE,
        errors=_BODY_ERRORS),
    Operation("post", "/detokenize", KEY, lambda on: on.texts.detokenize,
        "Convert token ids to text", ("content", "prompt"), worker.DETOKENIZE, ("tokens",),
        errors=_BODY_ERRORS),
    Operation("post", "/apply-template", KEY, lambda on: on.texts.apply_template,
        "Render a conversation with the chat template", ("prompt",),
        worker.APPLY_TEMPLATE, ("messages",),
        errors=_BODY_ERRORS),
    Operation("post", "/v1/responses/input_tokens", KEY, lambda on: on.responses.input_tokens,
        "Count the tokens of a prompt", ("object", "input_tokens"),
        openai_responses.TABLE, openai_responses.REQUIRED, errors=_BODY_ERRORS),
    Operation("post", "/v1/responses/compact", KEY, lambda on: on.responses.compact,
        "Summarize a conversation", ("id", "object", "created_at", "output", "usage"),
        openai_responses.TABLE, openai_responses.REQUIRED, errors=(*_BODY_ERRORS, *_ENGINE_ERRORS)),
    Operation("get", "/v1/responses/{id}", KEY, lambda on: on.responses.read,
        "Show a response, or its finished part", openai_responses.KEYS,
        query=("stream", "starting_after"), media=(JSON, EVENTS), errors=(400, 404)),
    Operation("delete", "/v1/responses/{id}", KEY, lambda on: on.responses.delete,
        "Stop and delete a response", ("id", "object", "deleted"), errors=(404,)),
    Operation("post", "/v1/responses/{id}/cancel", KEY, lambda on: on.responses.cancel,
        "Stop a response", openai_responses.KEYS, errors=(404,)),
    Operation("get", "/v1/responses/{id}/input_items", KEY, lambda on: on.responses.input_items,
        "List the input of a response", ("object", "data", "has_more"),
        query=("limit", "order", "after"), errors=(400, 404)),
    Operation("post", "/v1/conversations", KEY, lambda on: on.conversations.create,
        "Create a conversation", conversations.KEYS, conversations.CREATED,
        errors=(400, 408, 413, 415, 503)),
    Operation("get", "/v1/conversations/{id}", KEY, lambda on: on.conversations.read,
        "Show a conversation", conversations.KEYS, errors=(404,)),
    Operation("post", "/v1/conversations/{id}", KEY, lambda on: on.conversations.update,
        "Replace the metadata of a conversation", conversations.KEYS, conversations.UPDATED,
        tuple(conversations.UPDATED), errors=(*_BODY_ERRORS, 409, 503)),
    Operation("delete", "/v1/conversations/{id}", KEY, lambda on: on.conversations.delete,
        "Delete a conversation", ("id", "object", "deleted"), errors=(404, 409, 503)),
    Operation("get", "/v1/conversations/{id}/items", KEY, lambda on: on.conversations.list,
        "List the items of a conversation", _LIST,
        query=("limit", "order", "after"), errors=(400, 404)),
    Operation("post", "/v1/conversations/{id}/items", KEY, lambda on: on.conversations.add,
        "Add items to a conversation", _LIST, conversations.ADDED, tuple(conversations.ADDED),
        errors=(*_BODY_ERRORS, 409, 503)),
    Operation("get", "/v1/conversations/{id}/items/{item:path}", KEY,
        lambda on: on.conversations.item, "Show an item of a conversation", ("id", "type"),
        errors=(404,)),
    Operation("delete", "/v1/conversations/{id}/items/{item:path}", KEY,
        lambda on: on.conversations.remove, "Remove an item of a conversation",
        conversations.KEYS, errors=(404, 409, 503)),
    Operation("post", "/v1/files", KEY, lambda on: on.files.create,
        "Upload a file of requests, as a form", _FILE, errors=(400, 408, 413, 415, 503)),
    Operation("get", "/v1/files", KEY, lambda on: on.files.list,
        "List the files of a key", _LIST,
        query=("purpose", "limit", "order", "after"), errors=(400,)),
    Operation("get", "/v1/files/{id}", KEY, lambda on: on.files.read,
        "Show a file", _FILE, errors=(404,)),
    Operation("delete", "/v1/files/{id}", KEY, lambda on: on.files.delete,
        "Delete a file", ("id", "object", "deleted"), errors=(400, 404, 503)),
    Operation("get", "/v1/files/{id}/content", KEY, lambda on: on.files.content,
        "Download a file", media=("application/octet-stream",), errors=(404,)),
    Operation("post", "/v1/batches", KEY, lambda on: on.batches.create,
        "Create a batch: answer a file of requests in the background", _BATCH,
        batch_lines.BATCH_FIELDS, batch_lines.BATCH_REQUIRED, errors=(*_BODY_ERRORS, 500, 503)),
    Operation("get", "/v1/batches", KEY, lambda on: on.batches.list,
        "List the batches of a key", _LIST, query=("limit", "after"), errors=(400,)),
    Operation("get", "/v1/batches/{id}", KEY, lambda on: on.batches.read,
        "Show the state of a batch", _BATCH, errors=(404,)),
    Operation("post", "/v1/batches/{id}/cancel", KEY, lambda on: on.batches.cancel,
        "Cancel a batch", _BATCH, errors=(404, 503)),
    Operation("post", "/v1/messages/batches", KEY, lambda on: on.message_batches.create,
        "Create a batch: answer many messages in the background", _MESSAGE_BATCH,
        batch_lines.REQUESTS_FIELDS, batch_lines.REQUESTS_REQUIRED,
        errors=(*_BODY_ERRORS, 500, 503), error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/messages/batches", KEY, lambda on: on.message_batches.list,
        "List the message batches of a key", ("data", "has_more", "first_id", "last_id"),
        query=("limit", "after_id", "before_id"), errors=(400,),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/messages/batches/{id}", KEY, lambda on: on.message_batches.read,
        "Show the state of a message batch", _MESSAGE_BATCH, errors=(404,),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("post", "/v1/messages/batches/{id}/cancel", KEY,
        lambda on: on.message_batches.cancel, "Cancel a message batch", _MESSAGE_BATCH,
        errors=(404, 503), error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("delete", "/v1/messages/batches/{id}", KEY, lambda on: on.message_batches.delete,
        "Delete a message batch that has ended", ("id", "type"), errors=(400, 404, 503),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/messages/batches/{id}/results", KEY,
        lambda on: on.message_batches.results, "Download the results, one per line",
        media=("application/x-jsonl",), errors=(400, 404),
        error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    Operation("get", "/v1/streams/{id}", KEY, lambda on: on.streams.state,
        "Show the state of a stream", _STREAM, errors=(404,)),
    Operation("get", "/v1/streams/{id}/events", KEY, lambda on: on.streams.events,
        "Send the events after a cursor; 204 if the stream has ended there",
        query=("after", "view", "limit", "wait"), headers=("Last-Event-ID",),
        media=(EVENTS, LINES.MEDIA_TYPE, JSON), errors=(400, 404)),
    Operation("post", "/v1/streams/{id}/cancel", KEY, lambda on: on.streams.cancel,
        "Stop a stream", _STREAM, errors=(404,)),
    Operation("delete", "/v1/streams/{id}", KEY, lambda on: on.streams.delete,
        "Stop and delete a stream", status=204, media=()),
    Operation("get", "/v1/durable/{id}", KEY, lambda on: on.durable.read,
        "Read a stream with Durable Streams 1.0", query=("offset", "live", "cursor"),
        headers=("If-None-Match",), media=(JSON, EVENTS), errors=(400, 404, 410)),
    Operation("get", "/v1/stream", KEY, lambda on: on.stream_bytes.read,
        "Send the body of a POST's answer, starting at a byte", query=("conv_id", *_SPAN),
        media=(EVENTS, LINES.MEDIA_TYPE, JSON), errors=(400, 404, 416), error="ByteError"),
    Operation("get", "/v1/stream/{id:path}", KEY, lambda on: on.stream_bytes.read,
        "Send the body of a POST's answer, starting at a byte", query=_SPAN,
        media=(EVENTS, LINES.MEDIA_TYPE, JSON), errors=(400, 404, 416), error="ByteError"),
    Operation("delete", "/v1/stream", KEY, lambda on: on.stream_bytes.delete,
        "Stop and delete a stream", query=("conv_id",), status=204, media=(), errors=(400,),
        error="ByteError"),
    Operation("delete", "/v1/stream/{id:path}", KEY, lambda on: on.stream_bytes.delete,
        "Stop and delete a stream", status=204, media=(), errors=(400,), error="ByteError"),
    Operation("get", "/v1/streams", KEY, lambda on: on.stream_bytes.find,
        "Find the streams of conversations", query=("conversation_id",), errors=(400,),
        error="ByteError"),
    Operation("post", "/v1/streams/lookup", KEY, lambda on: on.stream_bytes.lookup,
        "Find the streams of conversations", table=_LOOKUP,
        errors=(400, 408, 413, 415), error="ByteError"),
)
# fmt: on
"""One row per method and path, in the order of /openapi.json. A request matches at most one row."""
