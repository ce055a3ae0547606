"""Requests for vectors: checked, tokenized, computed by the model's host, and counted."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.admission import Admission, Asked, Capacity, Place, Queues
from headrace.generation.model_checks import encode, too_long
from headrace.generation.vector_batch import VectorBatch, VectorWork
from headrace.workers.pool import Work
from headrace_common.errors import RequestError
from headrace_common.jobs import Encoded, EncodePairs, EncodePrompts
from headrace_common.request import BACKGROUND
from headrace_common.sampling import Pooling
from headrace_common.vector_request import VectorRequest

Check = Callable[[ServedModel], None]


class Vectors(msgspec.Struct, frozen=True):
    """Packed float32, in the order of the inputs."""

    model: ServedModel
    vectors: tuple[bytes, ...]
    num_tokens: int


class VectorMaker:
    """Admits batches of inputs, and owns them until they have become vectors."""

    def __init__(self, queues: Queues, fleet: Fleet, work: Work) -> None:
        self.batches: set[VectorBatch] = set()
        self._queues = queues
        self._fleet = fleet
        self._work = work

    def ends(self) -> list[asyncio.Future[None]]:
        """The ends of all batches."""
        return [batch.ended for batch in self.batches]

    def stop(self, error: RequestError) -> None:
        """Ends all batches with this error."""
        for batch in self.batches:
            batch.stop(error)

    async def make(self, request: VectorRequest, check: Check = lambda model: None) -> Vectors:
        """The vectors, once all are there; RequestError says why there are none.

        `check` raises it for what this model cannot do. Being cancelled ends the work.
        """
        self._fleet.check_line()
        async with self._fleet.using(request.model) as host:
            check(host.model)
            return await self._make(request)

    async def _make(self, request: VectorRequest) -> Vectors:
        host, queue = self._queues.find(request.model, request.priority >= BACKGROUND)
        model = host.model
        if request.model in model.adapters:
            message = f"{request.model} is an adapter; vectors are made by {model.names[0]} alone."
            raise RequestError("unsupported_operation", message, "model")
        digest = hashlib.sha256(request.packed).digest()
        asked = Asked(request.owner, digest, 1)
        queue.check(asked, Capacity.of(model.ready), time.monotonic())
        pooling = pooling_for(model, request.task)
        encoded = await self._tokenized(request, model)
        inputs = encoded.prompts
        host, queue = self._queues.find(request.model, request.priority >= BACKGROUND)
        place = self._enter(queue, asked, model, inputs)
        pooling = msgspec.structs.replace(pooling, num_first=encoded.num_first)
        began, outcome, num_tokens = time.monotonic(), "client_gone", 0
        try:
            # an owner has no line break, so that no salt can pass for another owner's
            work = VectorWork(inputs, pooling, f"{request.owner}\n", place, request.priority)
            vectors = await self._run(VectorBatch(work), host)
            outcome, num_tokens = "finished", sum(map(len, inputs)) // 4
        except RequestError as error:
            outcome = error.code
            raise
        finally:
            seconds = time.monotonic() - began
            figures = host.metrics.of(request.priority >= BACKGROUND)
            figures.embedded(request.route, outcome, num_tokens, seconds)
        return Vectors(model, vectors, num_tokens)

    async def _run(self, batch: VectorBatch, host: ModelHost) -> tuple[bytes, ...]:
        """Computes a batch there; until it ends, its inputs count as waiting or live."""
        self.batches.add(batch)
        host.tenants.add(batch)
        try:
            return await batch.run()
        finally:
            host.tenants.remove(batch)
            self.batches.remove(batch)

    def _enter(
        self, queue: Admission, asked: Asked, model: ServedModel, inputs: Sequence[bytes]
    ) -> Place:
        """The first inputs take places in the queue; for the key all of them count."""
        capacity = Capacity.of(model.ready)
        sizes = [len(ids) // 4 for ids in inputs]
        first = sizes[: capacity.max_num_seqs]
        asked = asked._replace(num_choices=len(first), num_tokens=sum(first))
        place = queue.enter(asked, capacity, time.monotonic())
        self._queues.limits.used(asked.owner, sum(sizes) - sum(first))
        return place

    async def _tokenized(self, request: VectorRequest, model: ServedModel) -> Encoded:
        longest = model.max_model_len
        job = (
            EncodePairs(longest, model.names[0])
            if request.task == "score"
            else EncodePrompts(longest, model.names[0], to_embed=True)
        )
        encoded = await encode(self._work, model, job, request.packed, request.ahead)
        for number, ids in enumerate(encoded.prompts):
            param = f"{request.field}[{number}]" if request.is_list else request.field
            if not ids:
                message = "An input has no tokens; send at least one character."
                raise RequestError("empty_prompt", message, param)
            if len(ids) // 4 > longest:
                raise too_long(longest, longest, param, f"at least {len(ids) // 4}", len(ids) // 4)
        return encoded


def pooling_for(model: ServedModel, task: str) -> Pooling:
    """How the model makes a vector; RequestError if it makes none of this kind."""
    assert model.ready is not None
    tasks = model.ready.tasks
    if task not in tasks:
        raise _cannot(model, task, tasks)
    if task == "score":
        return Pooling(("score",))
    if model.pooling == "auto" and model.sentences.objection:
        raise RequestError(
            "unsupported_operation",
            f"{model.names[0]} cannot embed as its makers do: {model.sentences.objection}.",
            "model",
        )
    return Pooling(model.ready.pooling)


def _cannot(model: ServedModel, task: str, tasks: Sequence[str]) -> RequestError:
    name = model.names[0]
    if task == "score":
        remedy = "serve a cross-encoder, whose config.json names a …ForSequenceClassification"
        return RequestError(
            "unsupported_operation", f"{name} cannot rank documents; {remedy}.", "model"
        )
    if "score" in tasks:
        remedy = "it ranks documents: use /v1/rerank, or serve an embedding model"
    else:
        remedy = "its lane gives no hidden states of a model that generates: serve an embedding "
        remedy += "model, or one that lane native-text runs"
    return RequestError("unsupported_operation", f"{name} cannot embed; {remedy}.", "model")
