"""The engine in the caller's process: the road of a request without HTTP, safe for threads."""

import asyncio
import concurrent.futures
import contextlib
import queue
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from headrace.engines.local import LocalEngine
from headrace.fleet.load_watch import LoadTeller, LoadWatch, OnLoading
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.intake import Intake
from headrace.metrics.metrics import Metrics
from headrace.protocols.dialect import Dialect, dialect_of
from headrace.protocols.fields.common import known_fields
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import completions as openai_completions
from headrace.protocols.openai.completions import PromptList
from headrace.protocols.requests import pack
from headrace.protocols.vectors import embeddings, rerank
from headrace.protocols.worker import Jobs
from headrace.streams.events import AnyEvent, Error, Tokens
from headrace.streams.record import Names
from headrace.streams.stores.memory import MemoryStore
from headrace.text.model_names import Aliases, settled_aliases, told_apart
from headrace.workers.pool import ThreadWork
from headrace_common.answer import Answer, Messages, Piece, Ranked, asked_for
from headrace_common.config import sources
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import ConfigError, RequestError, StreamFailed
from headrace_common.jobs import CheckedBody, RankDocuments
from headrace_common.loading import ENGINE, ON_LOADING, READING
from headrace_common.messages import Ready
from headrace_common.request import ResponseOptions, Route

T = TypeVar("T")
Prompt = str | list[int]

_OPTIONS = ResponseOptions(return_token_ids=True)
_NAMES = Names(can_attach=False)  # each call is a stream of its own


class LLM:
    """A loaded model. Calls may come from any thread; those at the same time share steps.

    Fields of a call are those of the HTTP routes, checked alike: RequestFailed says what is wrong.
    Unlike there, an unknown field is refused too.
    """

    def __init__(self, config: ServerConfig, on_progress: OnLoading | None = None) -> None:
        """`on_progress` gets a LoadProgress, as `load` says."""
        if not isinstance(config, ServerConfig):
            raise ConfigError(f"LLM takes a ServerConfig; use LLM.load({config!r}).")
        self._host = _Host(config, on_progress)

    @classmethod
    def load(
        cls, model: str = "headrace-mini", on_progress: OnLoading | None = None, **options: Any
    ) -> "LLM":
        """Options are the flags of `headrace serve` with underscores.

        `on_progress` is called by a thread: at stages of the load that last, and every 2 s.
        ConfigError if an option is wrong, ModelError if the model cannot be run.
        """
        given = {"model": model, **options}
        return cls(sources.load(given, {}, None, are_options=True), on_progress)

    @property
    def ready(self) -> Ready:
        """The loaded model and its limits."""
        return self._host.ready

    @overload
    def generate(self, prompt: Prompt, **fields: Any) -> Answer: ...

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **fields: Any) -> list[Answer]: ...

    def generate(self, prompt: Any, **fields: Any) -> Any:
        """Continues a prompt, a text or token ids, without a chat template.

        Of several prompts at once each is answered as if it were alone.
        """
        checked = self._host.check(openai_completions, {**fields, "prompt": prompt})
        asked: PromptList = checked["prompt"]
        calls = [
            _call(openai_completions, {**checked, "prompt": PromptList((one,), False)})
            for one in asked.prompts
        ]
        answers = self._host.call(self._host.answers(calls))
        return answers if asked.is_list else answers[0]

    def chat(self, messages: Messages | str | None, **fields: Any) -> Answer:
        """Answers the last message; a string is the only one."""
        if messages is None:
            message = "chat needs messages: a list of them, or a text."
            raise RequestError("missing_required_parameter", message, "messages")
        checked = self._host.check(openai_chat, {**fields, **asked_for(messages, None)})
        call = _call(openai_chat, checked)
        return self._host.call(self._host.answers([call]))[0]

    def stream(
        self,
        messages: Messages | str | None = None,
        *,
        prompt: Prompt | list[str] | list[list[int]] | None = None,
        **fields: Any,
    ) -> Iterator[Piece]:
        """The pieces of an answer to messages, or to a raw `prompt`, as they come.

        Leaving the loop ends the work on it.
        """
        dialect = openai_chat if prompt is None else openai_completions
        checked = self._host.check(dialect, {**fields, **asked_for(messages, prompt)})
        return self._host.pieces(_call(dialect, checked))

    @overload
    def embed(self, input: Prompt, **fields: Any) -> list[float]: ...

    @overload
    def embed(self, input: list[str] | list[list[int]], **fields: Any) -> list[list[float]]: ...

    def embed(self, input: Any, **fields: Any) -> Any:
        """The vector of a text or of token ids, or one for each of several; of length 1."""
        checked = self._host.inputs({**fields, "input": input})
        vectors = self._host.call(self._host.vectors(checked))
        return vectors if checked.fields["is_list"] else vectors[0]

    def rerank(self, query: str, documents: list[Any], **fields: Any) -> list[Ranked]:
        """The documents, texts or objects with a text, by relevance, the most relevant first."""
        checked = self._host.pairs({**fields, "query": query, "documents": documents})
        return self._host.call(self._host.ranking(checked))

    def close(self) -> None:
        """Ends what runs and frees the model. Idempotent."""
        self._host.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class _Call(NamedTuple):
    """A request by its route, with its prompts."""

    route: Route
    checked: CheckedBody


def _call(dialect: Dialect, fields: dict[str, Any]) -> _Call:
    return _Call(dialect.ROUTE, pack(dialect, fields))


class _Host:
    """Generation and a local engine on an event loop in a thread of its own."""

    def __init__(self, config: ServerConfig, on_progress: OnLoading | None) -> None:
        self.generation: Generation
        self.ready: Ready
        self._intake: Intake
        self._jobs: Jobs
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._has_started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._is_closed = False
        self._calling = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(config, on_progress), name="llm", daemon=True
        )
        self._thread.start()
        self._has_started.result()

    # from any thread

    def check(self, dialect: Dialect, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields as the routes check them; RequestError for one that they do not know."""
        _refuse_unknown(fields, known_fields(dialect.TABLE))
        checked = dialect.read(_as_json(fields))
        self._jobs.constrain(checked)
        self._jobs.refuse_unseen(checked)
        return checked

    def inputs(self, fields: dict[str, Any]) -> CheckedBody:
        """The inputs to embed, checked as the route does."""
        _refuse_unknown(fields, known_fields(embeddings.TABLE))
        return self._jobs.inputs(_as_json(fields))

    def pairs(self, fields: dict[str, Any]) -> CheckedBody:
        """The query and documents to rank, checked as the route does."""
        _refuse_unknown(fields, known_fields(rerank.TABLE))
        return self._jobs.query(_as_json(fields))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done on the loop; an interrupted call ends its work."""
        running = self._start(work)
        try:
            return running.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            running.cancel()

    def pieces(self, call: _Call) -> Iterator[Piece]:
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        running = self._start(self._feed(call, pieces))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            running.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            running.cancel()

    def close(self) -> None:
        with self._calling:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _start(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        with self._calling:
            if self._is_closed:
                work.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    # on the loop

    async def answers(self, calls: list[_Call]) -> list[Answer]:
        working = [asyncio.create_task(self._answer(call)) for call in calls]
        try:
            return await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()

    async def vectors(self, checked: CheckedBody) -> list[list[float]]:
        asked = embeddings.to_request(await self._intake.resolve(checked), "")
        made = await self.generation.vectors.make(
            asked, lambda it: embeddings.check(checked, it, it.ready)
        )
        dimensions = checked.fields.get("dimensions")
        are_units = made.model.embeds_units
        return [embeddings.cut(one, dimensions, are_units).tolist() for one in made.vectors]

    async def ranking(self, checked: CheckedBody) -> list[Ranked]:
        checked = await self._intake.resolve(checked)
        made = await self.generation.vectors.make(rerank.to_request(checked, rerank.ROUTES[0], ""))
        scores, top_n = b"".join(made.vectors), checked.fields.get("top_n")
        job = RankDocuments(scores, made.model.names[0], top_n, False)
        found = self._jobs.rank(job, checked.packed)
        return msgspec.json.decode(found, type=list[Ranked])

    async def _open(self, call: _Call) -> Found:
        checked = await self._intake.resolve(call.checked)
        opened = await self._intake.open(call.route, checked, _NAMES, options=_OPTIONS)
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

    async def _feed(self, call: _Call, pieces: "queue.SimpleQueue[Piece | None]") -> None:
        try:
            stream = await self._open(call)
            async with stream.audience.reader() as events:
                async for event in events:
                    _raise_if_cut(event)
                    if isinstance(event, Tokens):
                        pieces.put(_piece(event, stream.record.id))
                    events.sent(event)
        finally:
            pieces.put(None)

    def _run(self, config: ServerConfig, on_progress: OnLoading | None) -> None:
        try:
            asyncio.run(self._live(config, on_progress))
        except BaseException as error:
            if self._has_started.done():
                raise
            self._has_started.set_exception(error)
        finally:
            self._is_closed = True

    async def _live(self, config: ServerConfig, on_progress: OnLoading | None) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        aliases = settled_aliases(config.alias, told_apart(config.models))
        config = msgspec.structs.replace(config, alias=aliases)
        with _told(on_progress) as watch:
            served = await asyncio.to_thread(ServedModel, config.models[0], watch.download)
            served.read_adapters(config.models[0])
            local = msgspec.structs.replace(config.models[0], model=str(served.folder))
            watch.begin(ENGINE)
            engine, self.ready = await LocalEngine.start(local)
        self._jobs = Jobs(served, aliases=Aliases(aliases))
        work = ThreadWork(self._jobs)
        metrics = Metrics()
        host = ModelHost(local, lambda _: engine, metrics, served)
        config = _unbounded(config)
        self.generation = Generation(config, (host,), MemoryStore(), work, metrics)
        self._intake = Intake(self.generation, config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.generation.run(), name="generation")
            await host.engine.wait_until_ready()
            self._has_started.set_result(None)
            await self._closing.wait()
            await engine.close()


@contextlib.contextmanager
def _told(on_progress: OnLoading | None) -> Iterator[LoadWatch]:
    """Reports the progress of a load within the context."""
    watch = LoadWatch()
    watch.begin(READING)
    ON_LOADING.set(watch.tell)
    told = LoadTeller(lambda: (watch.progress,), on_progress or (lambda progress: None))
    with told:
        yield watch


def _unbounded(config: ServerConfig) -> ServerConfig:
    """A caller waits as long as it likes, and once it leaves nobody can come back."""
    streams = msgspec.structs.replace(
        config.streams,
        max_num_queued_reqs=sys.maxsize,
        max_num_queued_tokens=sys.maxsize,
        queue_timeout_s=0.0,
        linger_s=0.0,
    )
    return msgspec.structs.replace(config, streams=streams)


def _refuse_unknown(fields: dict[str, Any], known: set[str]) -> None:
    for name in fields:
        if name not in known:
            message = f"There is no field {name}{sources.nearest(name, known)}"
            raise RequestError("unsupported_parameter", message, name)


def _as_json(value: Any) -> Any:
    """The value as a body would hold it: arrays and string keys, nothing shared with the caller."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {_as_json(str(key)): _as_json(item) for key, item in value.items()}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"A text has half a surrogate pair as character {error.start}; leave it out."
            raise RequestError("invalid_json", message) from None
    return value


def _piece(event: Tokens, stream_id: str) -> Piece:
    reason = event.end.finish_reason if event.end else None
    return Piece.of((stream_id, event.choice), event.pieces, event.ids, reason)


def _raise_if_cut(event: AnyEvent) -> None:
    if isinstance(event, Error):
        raise StreamFailed(event.code, event.message)


def _closed() -> RequestError:
    return RequestError("server_shutdown", "The model was closed.")
