"""A fake engine whose messages a test sends, and a fake user of it."""

from headrace.engines.client import EngineDown, EngineNews, EngineUp, NewsQueue
from headrace.fleet.engine_users import EngineUsers, InQueue, UserNews
from headrace.fleet.queue_eta import TokenDemand
from headrace.fleet.served_model import ServedModel
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import (
    Cancel,
    DropAdapter,
    Finished,
    FinishReason,
    LoadAdapter,
    NewToken,
    Outputs,
    PromptAdvance,
    Ready,
    Started,
    Status,
    Submit,
)
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
    """A fake EngineClient that records `submits` and `cancels`; `say` sends its messages."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.adapted: list[LoadAdapter | DropAdapter] = []
        self.news = NewsQueue()

    def submit(self, submit: Submit) -> None:
        self.submits.append(submit)

    def cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        self.adapted.append(message)

    async def close(self) -> None:
        self.news.end(None)
        self.news = NewsQueue()  # of the next one, which a host may start

    async def say(self, news: EngineNews) -> None:
        """Send a message and wait until all receivers have handled it."""
        self.news.put(news)
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
        """Confirm every pending cancel."""
        cancels, self.cancels = self.cancels, []
        for cancel in cancels:
            for sequence_id in cancel.sequence_ids:
                await self.finish(sequence_id, cancel.finish)

    @property
    def newest(self) -> SequenceId:
        return self.submits[-1].sequences[0].sequence_id


class FakeUser:
    """A fake user that opens `num_sequences` sequences and records what it receives."""

    def __init__(self, num_sequences: int) -> None:
        self.begun: list[EngineUp] = []
        self.told: list[UserNews] = []
        self.places: list[InQueue] = []
        self.lost: list[RequestError] = []
        self.loads: list[tuple[float | None, str]] = []
        self.ids: list[SequenceId] = []
        self.engine: EngineUsers | None = None
        self._num_sequences = num_sequences

    def begin(self, model: ServedModel, engine: EngineUsers, up: EngineUp) -> None:
        self.begun.append(up)
        self.engine = engine
        self.ids = [engine.open(self) for _ in range(self._num_sequences)]

    def tell(self, news: UserNews) -> None:
        self.told.append(news)

    def set_queue_position(self, place: InQueue) -> None:
        self.places.append(place)

    def set_load_progress(self, progress: float | None, stage: str) -> None:
        self.loads.append((progress, stage))

    def lose(self, error: RequestError) -> None:
        self.lost.append(error)

    def asked(self, sequence_id: SequenceId) -> TokenDemand:
        return TokenDemand(5, 8)
