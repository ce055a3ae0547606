"""Serves requests for vectors: checks and tokenizes the inputs, and computes the vectors."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.admission import Admission, Capacity, Demand, Queues, QueueTicket
from headrace.generation.model_checks import encode, too_long
from headrace.generation.submission import salt_of
from headrace.generation.vector_batch import VectorBatch, VectorWork
from headrace.workers.input_memory import HeldInput
from headrace.workers.pool import JobRunner
from headrace_common.errors import RequestError
from headrace_common.log_context import log_request
from headrace_common.request import BACKGROUND
from headrace_common.sampling import Pooling
from headrace_common.vector_request import VectorRequest
from headrace_common.worker_jobs import Encoded, EncodePairs, EncodePrompts

Check = Callable[[ServedModel], None]


class Vectors(msgspec.Struct, frozen=True):
    """Packed float32 vectors, in the order of the inputs."""

    model: ServedModel
    vectors: tuple[bytes, ...]
    num_tokens: int


class VectorMaker:
    """Admits batches of inputs, and owns each batch until its vectors are computed."""

    def __init__(self, queues: Queues, fleet: Fleet, work: JobRunner) -> None:
        self.batches: set[VectorBatch] = set()
        self._queues = queues
        self._fleet = fleet
        self._work = work

    def ends(self) -> list[asyncio.Future[None]]:
        """Return one future per batch; the future is done when the batch ends."""
        return [batch.ended for batch in self.batches]

    def stop(self, error: RequestError) -> None:
        """End all batches with this error."""
        for batch in self.batches:
            batch.stop(error)

    async def make(
        self,
        request: VectorRequest,
        check: Check = lambda model: None,
        on_vector: Callable[[], None] = lambda: None,
    ) -> Vectors:
        """Return all vectors of a request. Raises RequestError if a vector cannot be computed.

        `check` raises RequestError if the model cannot serve the request. `on_vector` is called
        after each vector. Cancelling the call ends the computation.
        """
        self._fleet.check_line()
        with self._queues.inputs.hold(request.owner, len(request.packed)) as held:
            async with self._fleet.using(request.model) as host:
                check(host.model)
                return await self._make(request, host, on_vector, held)

    async def _make(
        self,
        request: VectorRequest,
        host: ModelHost,
        on_vector: Callable[[], None],
        held: HeldInput,
    ) -> Vectors:
        model, is_background = host.model, request.priority >= BACKGROUND
        if request.model in model.adapters:
            message = f"The adapter {request.model} cannot compute vectors; "
            message += f"use its base model {model.names[0]}."
            raise RequestError("unsupported_operation", message, "model")
        demand = Demand(request.owner, request.digest, 1)
        queue = self._queues.of(host, is_background)
        queue.check(demand, Capacity.of(model.ready), time.monotonic())
        pooling = pooling_for(model, request.task)
        encoded = await self._tokenized(request, model)
        inputs = encoded.prompts
        held.resize(len(request.packed) + sum(map(len, inputs)))
        queue = self._queues.of(host, is_background)
        ticket = self._enter(queue, demand, model, inputs)
        began, outcome, num_tokens = time.monotonic(), "client_gone", 0
        try:
            salt = salt_of(request.owner, "")
            work = VectorWork(
                *(inputs, pooling, salt, ticket, request.priority, on_vector),
                *(encoded.nums_first, request.owner),
            )
            vectors = await self._run(VectorBatch(work), host)
            outcome, num_tokens = "finished", sum(map(len, inputs)) // 4
            # If the request fails, the code that sends the error logs the request.
            total_ms = round((time.monotonic() - began) * 1000)
            log_request(request.route, outcome, prompt_tokens=num_tokens, total_ms=total_ms)
        except RequestError as error:
            outcome = error.code
            raise
        finally:
            seconds = time.monotonic() - began
            figures = host.metrics.of(is_background)
            figures.embedded(request.route, outcome, num_tokens, seconds)
        return Vectors(model, vectors, num_tokens)

    async def _run(self, batch: VectorBatch, host: ModelHost) -> tuple[bytes, ...]:
        """Compute a batch on this host."""
        self.batches.add(batch)
        host.users.add(batch)
        try:
            return await batch.run()
        finally:
            host.users.remove(batch)
            self.batches.remove(batch)

    def _enter(
        self, queue: Admission, demand: Demand, model: ServedModel, inputs: Sequence[bytes]
    ) -> QueueTicket:
        """Enter the first inputs into the queue, and charge the key for all inputs."""
        capacity = Capacity.of(model.ready)
        sizes = [len(ids) // 4 for ids in inputs]
        first = sizes[: capacity.max_num_seqs]
        demand = demand._replace(num_choices=len(first), num_tokens=sum(first))
        ticket = queue.enter(demand, capacity, time.monotonic())
        self._queues.limits.used(demand.owner, sum(sizes) - sum(first))
        return ticket

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
    """Return how the model computes a vector for this task.

    Raises RequestError if the model cannot compute such a vector.
    """
    assert model.ready is not None
    tasks = model.ready.tasks
    if task not in tasks:
        raise _cannot(model, task, tasks)
    if task == "score":
        return Pooling(("score",))
    if model.pooling == "auto" and model.sentences.objection:
        raise RequestError(
            "unsupported_operation",
            f"{model.names[0]} cannot embed in the way its authors define: "
            f"{model.sentences.objection}.",
            "model",
        )
    return Pooling(model.ready.pooling)


def _cannot(model: ServedModel, task: str, tasks: Sequence[str]) -> RequestError:
    name = model.names[0]
    if task == "score":
        remedy = "serve a cross-encoder (config.json names a …ForSequenceClassification model)"
        return RequestError(
            "unsupported_operation", f"{name} cannot rank documents; {remedy}.", "model"
        )
    if "score" in tasks:
        remedy = "it ranks documents: use /v1/rerank, or serve an embedding model"
    else:
        remedy = "its lane returns no hidden states. Serve an embedding model, or a model "
        remedy += "that lane native-text can run"
    return RequestError("unsupported_operation", f"{name} cannot embed; {remedy}.", "model")
