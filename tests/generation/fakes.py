"""An engine that says what a test tells it to, and a generation around it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.config.settings import ModelConfig, ServerConfig, StreamConfig
from headrace.core.ids import SequenceId
from headrace.core.layout import MemoryLayout
from headrace.core.messages import (
    Cancel,
    Finished,
    FinishReason,
    NewToken,
    Outputs,
    PromptAdvance,
    Ready,
    Started,
    Status,
    Submit,
)
from headrace.core.request import Request, Text
from headrace.core.sampling import Sampling
from headrace.engine.client import EngineDown, EngineNews, EngineUp, NewsQueue
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import PLAIN, Generation
from headrace.generation.registry import Found
from headrace.metrics.metrics import Metrics
from headrace.protocols.worker import Jobs
from headrace.streams.events import AnyEvent, Tokens
from headrace.streams.memory_store import MemoryStore
from headrace.streams.record import Names
from headrace.streams.store import Store
from headrace.workers.pool import ThreadWork
from tools.harness.eventually import settle

READY = Ready(
    lane="native-text",
    device="cpu",
    dtype="float32",
    vocab_size=320,
    max_model_len=256,
    max_num_seqs=2,
    num_parameters=1,
    weight_bytes=4,
    layout=MemoryLayout(num_blocks=32, max_positions=256),
    fingerprint="0123456789ab",
)
STATUS = Status(
    num_running=0, num_waiting=1, num_waiting_tokens=5, blocks_free=32, slots_free=0, num_steps=0
)
DOWN = EngineDown("engine_failed", "It died.", given_up=False)


class FakeEngine:
    """An EngineClient. `submits` and `cancels` are what it was sent, `say` is what it answers."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self._news = NewsQueue()

    def submit(self, submit: Submit) -> None:
        self.submits.append(submit)

    def cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)

    def outputs(self) -> AsyncIterator[EngineNews]:
        return aiter(self._news)

    async def close(self) -> None:
        self._news.end()

    async def say(self, news: EngineNews) -> None:
        """Until all who hear it have acted on it."""
        self._news.put(news)
        await settle()

    async def start(self, *sequence_ids: SequenceId) -> None:
        await self.say(
            Outputs(
                started=tuple(Started(id, 5, 0) for id in sequence_ids),
                progress=tuple(PromptAdvance(id, 5) for id in sequence_ids),
            )
        )

    async def token(self, sequence_id: SequenceId, token_id: int) -> None:
        await self.say(Outputs(tokens=(NewToken(sequence_id, token_id),)))

    async def finish(
        self, sequence_id: SequenceId, finish: FinishReason, message: str = ""
    ) -> None:
        await self.say(Outputs(finished=(Finished(sequence_id, finish, "", message),)))

    async def let_go(self) -> None:
        """Confirms every cancel that is not confirmed yet."""
        cancels, self.cancels = self.cancels, []
        for cancel in cancels:
            for sequence_id in cancel.sequence_ids:
                await self.finish(sequence_id, cancel.finish)

    @property
    def newest(self) -> SequenceId:
        return self.submits[-1].sequences[0].sequence_id


@contextlib.asynccontextmanager
async def running(
    folder: Path, store: Store | None = None, **options: float
) -> AsyncIterator[tuple[Generation, FakeEngine]]:
    """A generation over a fake engine that is up, for a minute at most."""
    model = ModelConfig(model=str(folder), served_model_name=("tiny",))
    config = ServerConfig(models=(model,), streams=StreamConfig(**options))
    engine = FakeEngine()
    served = ServedModel(model)
    work = ThreadWork(Jobs(served))
    metrics = Metrics()
    hosts = (ModelHost(model, lambda _: engine, metrics, served),)
    generation = Generation(config, hosts, store or MemoryStore(), work, metrics)
    task = asyncio.create_task(generation.run())
    await settle()  # what the store holds is taken up long before an engine has loaded
    await engine.say(EngineUp(READY))
    try:
        async with asyncio.timeout(60):
            yield generation, engine
    finally:
        await engine.close()
        await asyncio.wait([task], timeout=5)
        task.cancel()


def make_request(text: str = "hello", **fields: object) -> Request:
    sampling = fields.pop("sampling", Sampling(temperature=0))
    return Request(
        route="/v1/completions",
        model="tiny",
        prompts=(Text(text),),
        sampling=sampling,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


async def opened(
    generation: Generation, engine: FakeEngine, names: Names = PLAIN, **fields: object
) -> Found:
    """A stream that the engine has been asked for."""
    stream = await generation.open(make_request(**fields), names)  # type: ignore[arg-type]
    await settle()
    return stream


async def read(stream: Found, after: int = -1) -> list[AnyEvent]:
    """All events to the end, as one client that gets them all."""
    found = []
    async with stream.reader(after) as events:
        async for event in events:
            found.append(event)
            events.sent(event)
    await settle()
    return found


def text_of(events: list[AnyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))
