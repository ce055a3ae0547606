"""Runs an engine and the generation of answers on an event loop, in a thread of the caller."""

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engines.local import LocalEngine
from headrace.fleet.load_progress import LoadProgressWatch, LoadReporter, OnLoading
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import Generation
from headrace.generation.prompt_report import plan_of
from headrace.generation.registry import Found
from headrace.intake.intake import Intake
from headrace.metrics.metrics import Metrics
from headrace.protocols.dialect import Dialect, dialect_of
from headrace.protocols.fields.common import TokenIds, known_fields
from headrace.protocols.fields.messages import refuse_images
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import completions as openai_completions
from headrace.protocols.openai.completions import MAX_PROMPTS, PromptList
from headrace.protocols.prompt_ids import PromptIds, ids_of
from headrace.protocols.requests import check_token_ids, pack
from headrace.protocols.vectors import embeddings, rerank
from headrace.protocols.worker import Jobs
from headrace.streams.events import AnyEvent, Error, Tokens
from headrace.streams.record import Names
from headrace.streams.stores.memory import MemoryStore
from headrace.text.model_names import Aliases, settled_aliases, with_unique_names
from headrace.workers.pool import ThreadJobRunner
from headrace_common.answer import (
    Answer,
    Piece,
    Ranked,
    are_several,
    asked_for,
    naming_input,
)
from headrace_common.config import sources
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import HeadraceError, RequestError, StreamFailed
from headrace_common.ingestion import Plan
from headrace_common.load_bar import LoadBar, can_redraw
from headrace_common.loading import ENGINE, ON_LOADING, READING
from headrace_common.messages import Ready
from headrace_common.progress_bar import progress_bar
from headrace_common.request import ResponseOptions, Route
from headrace_common.sampling_options import SamplingOptions, with_options
from headrace_common.worker_jobs import CheckedBody, RankDocuments

T = TypeVar("T")

_OPTIONS = ResponseOptions(return_token_ids=True)
# Each call gets a separate stream.
_NAMES = Names(can_attach=False)


class _Call(NamedTuple):
    """Holds a checked request and its route."""

    route: Route
    checked: CheckedBody


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Cut a list into parts of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _call(dialect: Dialect, fields: dict[str, Any]) -> _Call:
    return _Call(dialect.ROUTE, pack(dialect, fields))


class Host:
    """Runs generation and a local engine on an event loop, in a separate thread."""

    def __init__(
        self, config: ServerConfig, on_progress: OnLoading | None, waits: bool, owner: object
    ) -> None:
        """Begin the load. If `waits`, return when the model is ready, or raise the load's error.

        The model is freed when nothing refers to `owner` any more.
        """
        self.generation: Generation
        self.ready: Ready
        self.model: ServedModel
        self._intake: Intake
        self._jobs: Jobs
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self.has_started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._is_closed = False
        self._process_id = os.getpid()
        self._calling = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(config, on_progress), name="llm", daemon=True
        )
        self._thread.start()
        if waits:
            try:
                self.has_started.result()
            except HeadraceError as error:
                # Without the frames of the load's thread, the message is easier to see.
                raise error.with_traceback(None) from None
            except BaseException:
                # An interrupted caller has no object that it could close.
                self.close_later()
                raise
        # At exit, the model's thread ends with the process.
        weakref.finalize(owner, self._abandon).atexit = False

    # Any thread may call the methods below.

    def generate(
        self, prompt: Any, options: SamplingOptions | None, fields: dict[str, Any], progress: bool
    ) -> Coroutine[Any, Any, Any]:
        """Check the request, and return the work that answers one prompt or a list of prompts."""
        fields = with_options(fields, options, is_chat=False)
        is_list = are_several(prompt)
        calls: list[_Call] = []
        # The route limits the number of prompts in a body. A longer list is checked in parts.
        for part in _parts(prompt, MAX_PROMPTS) if is_list else (prompt,):
            checked = self._check(openai_completions, {**fields, "prompt": part})
            calls += (
                _call(openai_completions, {**checked, "prompt": PromptList((one,), False)})
                for one in checked["prompt"].prompts
            )
        return self._answers(calls, progress) if is_list else self._answer(calls[0])

    def chat(
        self, messages: Any, options: SamplingOptions | None, fields: dict[str, Any], progress: bool
    ) -> Coroutine[Any, Any, Any]:
        """Check the requests, and return the work that answers one or several conversations."""
        if messages is None:
            message = "chat needs messages: a list of messages, or a string."
            raise RequestError("missing_required_parameter", message, "messages")
        if not are_several(messages):
            return self._answer(self.stream(messages, None, options, fields))
        calls = []
        for number, conversation in enumerate(messages):
            with naming_input(number):
                calls.append(self.stream(conversation, None, options, fields))
        return self._answers(calls, progress)

    def stream(
        self,
        messages: Any,
        prompt: Any,
        options: SamplingOptions | None,
        fields: dict[str, Any],
    ) -> "_Call":
        """Check a request that has either messages or a prompt, and return it with its route."""
        dialect = openai_chat if prompt is None else openai_completions
        fields = with_options(fields, options, is_chat=prompt is None)
        return _call(dialect, self._check(dialect, {**fields, **asked_for(messages, prompt)}))

    def embed(
        self, input: Any, fields: dict[str, Any], progress: bool
    ) -> Coroutine[Any, Any, NDArray[np.float32]]:
        """Check the inputs as the route does, and return the work that embeds them."""
        fields = {**fields, "input": input}
        _refuse_unknown(fields, known_fields(embeddings.TABLE))
        return self._vectors(self._jobs.inputs(_as_json(fields)), progress)

    def rerank(
        self, query: str, documents: list[Any], fields: dict[str, Any]
    ) -> Coroutine[Any, Any, list[Ranked]]:
        """Check the query and the documents as the route does, and return the work of ranking."""
        fields = {**fields, "query": query, "documents": documents}
        _refuse_unknown(fields, known_fields(rerank.TABLE))
        return self._ranking(self._jobs.pairs(_as_json(fields)))

    def prompt_ids(self, messages: Any, fields: dict[str, Any]) -> PromptIds:
        """Tokenize messages with the chat template, or the raw text in the field `prompt`."""
        dialect = openai_completions if messages is None else openai_chat
        given = asked_for(messages, fields.get("prompt"))
        checked = self._check(dialect, {**fields, **given})
        refuse_images(checked.get("messages", ()), "only the tokens of text can be counted")
        prompts = dialect.to_prompts(checked)
        if len(prompts) != 1:
            message = f"prompt has {len(prompts)} prompts; give one."
            raise RequestError("invalid_value", message, "prompt")
        return ids_of(self.model, prompts[0], contextlib.nullcontext)

    def plan(self, messages: Any, fields: dict[str, Any]) -> Plan:
        return plan_of(self.ready, self.prompt_ids(messages, fields))

    def text_of(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        ids = TokenIds().check(token_ids, "token_ids")
        check_token_ids(ids, "token_ids", self.model.vocab_size)
        return self.model.tokenizer.decode(ids, skip_special_tokens)

    def _check(self, dialect: Dialect, fields: dict[str, Any]) -> dict[str, Any]:
        """Check the fields as the route does; raise RequestError for unknown fields too."""
        _refuse_unknown(fields, known_fields(dialect.TABLE))
        checked = dialect.read(_as_json(fields))
        self._jobs.constrain(checked)
        self._jobs.refuse_unseen(checked)
        return checked

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result; if the caller is interrupted, cancel it."""
        running = self.start(work)
        try:
            return running.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            running.cancel()

    async def result(self, running: "concurrent.futures.Future[T]") -> T:
        """Wait for `running` on another event loop; if the caller is cancelled, cancel it."""
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise _closed() from None

    def pieces(self, call: _Call) -> Iterator[Piece]:
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        running = self.start(self.feed(call, pieces.put))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            running.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            running.cancel()

    def close(self) -> None:
        """End all requests and free the model. A load in progress is finished first."""
        if self._is_forked:
            return
        # Wait for the end of the load.
        self.has_started.exception()
        self._end(self.has_started)
        self._thread.join()

    def close_later(self) -> None:
        """Close in a thread, for a caller that does not wait for the end of the load."""
        threading.Thread(target=self.close, name="close llm", daemon=True).start()

    def _abandon(self) -> None:
        """Close without waiting."""
        if not self._is_forked:
            self.has_started.add_done_callback(self._end)

    def _end(self, started: "concurrent.futures.Future[None]") -> None:
        with self._calling:
            if started.exception() is None and not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._closing.set)

    def start(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        if self._is_forked:
            work.close()
            message = "The model was loaded before this process was forked, and a fork does "
            message += "not copy threads; load the model in this process."
            raise RequestError("unsupported_operation", message)
        with self._calling:
            if self._is_closed:
                work.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def _is_forked(self) -> bool:
        """Return whether this process is a fork, in which the model's threads do not run."""
        return os.getpid() != self._process_id

    # The methods below run on the event loop.

    async def _answers(self, calls: list[_Call], progress: bool) -> list[Answer]:
        async def answer(number: int, call: _Call) -> Answer:
            with naming_input(number):
                found = await self._answer(call)
            count()
            return found

        with progress_bar(len(calls), "answers", progress) as count:
            working = [asyncio.create_task(answer(*each)) for each in enumerate(calls)]
            try:
                return await asyncio.gather(*working)
            finally:
                for task in working:
                    task.cancel()

    async def _vectors(self, checked: CheckedBody, progress: bool) -> NDArray[np.float32]:
        requested = embeddings.to_request(await self._intake.resolve(checked), "")
        is_shown = progress and checked.fields["is_list"]
        with progress_bar(len(checked.stubs), "vectors", is_shown) as count:
            made = await self.generation.vectors.make(
                requested, lambda it: embeddings.check(checked, it, it.ready), count
            )
        dimensions = checked.fields.get("dimensions")
        are_units = made.model.embeds_units
        rows = [embeddings.cut(one, dimensions, are_units) for one in made.vectors]
        vectors = np.array(rows, np.float32)
        return vectors if checked.fields["is_list"] else vectors[0]

    async def _ranking(self, checked: CheckedBody) -> list[Ranked]:
        checked = await self._intake.resolve(checked)
        made = await self.generation.vectors.make(rerank.to_request(checked, rerank.ROUTES[0], ""))
        scores, top_n = b"".join(made.vectors), checked.fields.get("top_n")
        job = RankDocuments(scores, made.model.names[0], top_n, False)
        found = self._jobs.rank(job, checked.packed)
        return msgspec.json.decode(found, type=list[Ranked])

    async def _open(self, call: _Call) -> Found:
        checked = await self._intake.resolve(call.checked)
        is_told = bool(checked.fields.get("return_ingestion"))
        options = msgspec.structs.replace(_OPTIONS, return_ingestion=is_told)
        opened = await self._intake.open(call.route, checked, _NAMES, options=options)
        return opened.stream

    async def _answer(self, call: _Call) -> Answer:
        stream = await self._open(call)
        answer = dialect_of(stream.record.request.route).response_body(stream.record)
        async with stream.audience.reader() as events:
            async for event in events:
                _raise_if_cut(event)
                answer.feed(event)
                events.sent(event)
        return Answer.of(answer.whole())

    async def feed(self, call: _Call, put: Callable[[Piece | None], None]) -> None:
        """Pass the pieces of an answer to `put`, and None at the end."""
        try:
            stream = await self._open(call)
            async with stream.audience.reader() as events:
                async for event in events:
                    _raise_if_cut(event)
                    if isinstance(event, Tokens):
                        put(_piece(event, stream.record.id))
                    events.sent(event)
        finally:
            put(None)

    def _run(self, config: ServerConfig, on_progress: OnLoading | None) -> None:
        try:
            asyncio.run(self._serve(config, on_progress))
        except BaseException as error:
            if self.has_started.done():
                raise
            self.has_started.set_exception(error)
        finally:
            self._is_closed = True

    async def _serve(self, config: ServerConfig, on_progress: OnLoading | None) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        aliases = settled_aliases(config.alias, with_unique_names(config.models))
        config = msgspec.structs.replace(config, alias=aliases)
        with _reporting(on_progress) as watch:
            served = await asyncio.to_thread(ServedModel, config.models[0], watch.download)
            served.read_adapters(config.models[0])
            local = msgspec.structs.replace(config.models[0], model=str(served.folder))
            watch.begin(ENGINE)
            engine, self.ready = await LocalEngine.start(local)
        self.model = served
        self._jobs = Jobs(served, aliases=Aliases(aliases))
        work = ThreadJobRunner(self._jobs)
        metrics = Metrics()
        host = ModelHost(local, lambda _: engine, metrics, served)
        config = _unbounded(config)
        self.generation = Generation(config, (host,), MemoryStore(), work, metrics)
        self._intake = Intake(self.generation, config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.generation.run(), name="generation")
            await host.engine.wait_until_ready()
            self.has_started.set_result(None)
            await self._closing.wait()
            await engine.close()


@contextlib.contextmanager
def _reporting(on_progress: OnLoading | None) -> Iterator[LoadProgressWatch]:
    """Report the progress of the load while the context is active.

    Without `on_progress`, a terminal shows a bar.
    """
    watch = LoadProgressWatch()
    watch.begin(READING)
    ON_LOADING.set(watch.tell)
    bar = LoadBar()
    report = on_progress or (bar.draw if can_redraw() else lambda progress: None)
    try:
        with LoadReporter(lambda: (watch.progress,), report):
            yield watch
    finally:
        bar.end()


def _unbounded(config: ServerConfig) -> ServerConfig:
    """Lift the limits on waiting: a caller decides how long to wait.

    A stream without readers ends immediately, because no later call can attach to the stream.
    """
    streams = msgspec.structs.replace(
        config.streams,
        max_num_queued_reqs=sys.maxsize,
        max_num_queued_tokens=sys.maxsize,
        max_total_input_bytes=sys.maxsize,
        queue_timeout_s=0.0,
        linger_s=0.0,
    )
    return msgspec.structs.replace(config, streams=streams)


def _refuse_unknown(fields: dict[str, Any], known: set[str]) -> None:
    for name in fields:
        if name not in known:
            message = f"Unknown field {name}{sources.nearest(name, known)}"
            raise RequestError("unsupported_parameter", message, name)


def _as_json(value: Any) -> Any:
    """Convert the value to what a JSON body can hold: tuples become lists, and keys strings.

    Raise RequestError for a text that UTF-8 cannot encode.
    """
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {_as_json(str(key)): _as_json(item) for key, item in value.items()}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"A text has half a surrogate pair as character {error.start}; remove it."
            raise RequestError("invalid_json", message) from None
    return value


def _piece(event: Tokens, stream_id: str) -> Piece:
    reason = event.end.finish_reason if event.end else None
    return Piece.of((stream_id, event.choice), event.pieces, event.ids, reason)


def _raise_if_cut(event: AnyEvent) -> None:
    if isinstance(event, Error):
        raise StreamFailed(event.code, event.message)


def _closed() -> RequestError:
    return RequestError("server_shutdown", "The model was closed; load it again.")
