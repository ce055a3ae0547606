"""The engine in the caller's process: the road of a request without HTTP, safe for threads."""

import asyncio
import concurrent.futures
import queue
import sys
import threading
from collections.abc import Coroutine, Iterator
from types import ModuleType, TracebackType
from typing import Any, TypeVar, overload

import msgspec

from headrace.answer import Answer, Piece
from headrace.core import settings
from headrace.core.config import ServerConfig
from headrace.core.errors import RequestError
from headrace.core.messages import Ready
from headrace.core.request import Request, Wire
from headrace.engine.local import LocalEngine
from headrace.gateway import chat_schema, completions_schema, render
from headrace.gateway.completions_schema import Asked
from headrace.generation.generation import Generation
from headrace.generation.served import ServedModel
from headrace.models.hub import OnProgress
from headrace.streams.events import AnyEvent, Error, Tokens
from headrace.streams.memory_store import MemoryStore

T = TypeVar("T")
Messages = list[dict[str, Any]]
Prompt = str | list[int]

_WIRE = Wire(return_token_ids=True)


class LLM:
    """A loaded model. Calls may come from any thread; those at the same time share steps.

    Fields of a call are those of the HTTP routes, checked alike: RequestError says what is wrong.
    """

    def __init__(self, config: ServerConfig, on_progress: OnProgress | None = None) -> None:
        """`on_progress` hears of bytes that a download has brought, and of those it shall."""
        self._host = _Host(config, on_progress)

    @classmethod
    def load(cls, model: str = "headrace-mini", **options: Any) -> "LLM":
        """Options are the flags of `headrace serve` with underscores.

        ConfigError if one is wrong, ModelError if the model cannot be run.
        """
        return cls(settings.load({"model": model, **options}, {}, None))

    @property
    def ready(self) -> Ready:
        """What was loaded, and its limits."""
        return self._host.ready

    @overload
    def generate(self, prompt: Prompt, **fields: Any) -> Answer: ...

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **fields: Any) -> list[Answer]: ...

    def generate(self, prompt: Any, **fields: Any) -> Any:
        """Continues a prompt, a text or token ids; of several at once, each as if it were alone."""
        checked = completions_schema.read(_as_json({**fields, "prompt": prompt}))
        asked: Asked = checked["prompt"]
        requests = [
            self._request(completions_schema, {**checked, "prompt": Asked((one,), False)})
            for one in asked.prompts
        ]
        answers = self._host.call(self._host.answers(requests))
        return answers if asked.is_list else answers[0]

    def chat(self, messages: Messages, **fields: Any) -> Answer:
        """Answers the last message."""
        checked = chat_schema.read(_as_json({**fields, "messages": messages}))
        request = self._request(chat_schema, checked)
        return self._host.call(self._host.answers([request]))[0]

    def stream(
        self, prompt_or_messages: Prompt | list[str] | Messages, **fields: Any
    ) -> Iterator[Piece]:
        """The pieces of one answer as they come. Leaving the loop ends the work on it."""
        given = prompt_or_messages
        is_chat = isinstance(given, list | tuple) and isinstance(next(iter(given), None), dict)
        schema, name = (chat_schema, "messages") if is_chat else (completions_schema, "prompt")
        checked = schema.read(_as_json({**fields, name: given}))
        return self._host.pieces(self._request(schema, checked))

    def close(self) -> None:
        """Ends what runs and frees the model. Idempotent."""
        self._host.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, schema: ModuleType, fields: dict[str, Any]) -> Request:
        model = self._host.generation.models.get(fields.get("model"))
        request: Request = schema.to_request(fields, model)
        return msgspec.structs.replace(request, wire=_WIRE)


class _Host:
    """Generation and a local engine on an event loop in a thread of its own."""

    def __init__(self, config: ServerConfig, on_progress: OnProgress | None) -> None:
        self.generation: Generation
        self.ready: Ready
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

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done on the loop; an interrupted call ends its work."""
        running = self._start(work)
        try:
            return running.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            running.cancel()

    def pieces(self, request: Request) -> Iterator[Piece]:
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        running = self._start(self._feed(request, pieces))
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

    async def answers(self, requests: list[Request]) -> list[Answer]:
        working = [asyncio.create_task(self._answer(request)) for request in requests]
        try:
            return await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()

    async def _answer(self, request: Request) -> Answer:
        stream = await self.generation.open(request)
        answer = render.Answer(stream.record)
        async with stream.reader() as events:
            async for event in events:
                _raise_if_cut(event)
                answer.feed(event)
                events.sent(event)
        return Answer.of(msgspec.json.decode(answer.body()))

    async def _feed(self, request: Request, pieces: "queue.SimpleQueue[Piece | None]") -> None:
        try:
            stream = await self.generation.open(request)
            async with stream.reader() as events:
                async for event in events:
                    _raise_if_cut(event)
                    if isinstance(event, Tokens):
                        pieces.put(_piece(event))
                    events.sent(event)
        finally:
            pieces.put(None)

    def _run(self, config: ServerConfig, on_progress: OnProgress | None) -> None:
        try:
            asyncio.run(self._live(config, on_progress))
        except BaseException as error:
            if self._has_started.done():
                raise
            self._has_started.set_exception(error)
        finally:
            self._is_closed = True

    async def _live(self, config: ServerConfig, on_progress: OnProgress | None) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        served = await asyncio.to_thread(ServedModel, config.models[0], on_progress)
        local = msgspec.structs.replace(config.models[0], model=str(served.folder))
        engine, self.ready = await LocalEngine.start(local)
        self.generation = Generation(_unbounded(config), served, engine, MemoryStore())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.generation.run(), name="generation")
            await self.generation.wait_until_ready()
            self._has_started.set_result(None)
            await self._closing.wait()
            await engine.close()


def _unbounded(config: ServerConfig) -> ServerConfig:
    """A caller waits as long as it likes, and once it leaves nobody can come back."""
    streams = msgspec.structs.replace(config.streams, max_num_queued_reqs=sys.maxsize, linger_s=0.0)
    return msgspec.structs.replace(config, streams=streams)


def _as_json(value: Any) -> Any:
    """As a body would hold it: arrays and string keys, nothing shared with the caller."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


def _piece(event: Tokens) -> Piece:
    text = "".join(piece.text for piece in event.pieces if piece.channel == "content")
    reason = event.end.finish_reason if event.end else None
    return Piece(event.choice, text, list(event.ids), reason)


def _raise_if_cut(event: AnyEvent) -> None:
    if isinstance(event, Error):
        raise RequestError(event.code, event.message)


def _closed() -> RequestError:
    return RequestError("server_shutdown", "The model was closed.")
