"""The processes that a server starts: engines and workers, inside the simulated system."""

import asyncio
import contextlib
import copy
import functools
import itertools
import signal
import zlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from detangle import choice, uniform

from headrace.engines.client import EngineDown
from headrace.protocols.worker import Jobs
from headrace.protocols.worker_model import WorkerModel
from headrace.text.model_names import Aliases, adapters_of, names_of, paths_of, root_of
from headrace.text.text_model import TextModel
from headrace.workers.job_queue import Body
from headrace.workers.pool import perform
from headrace.workers.process import Reply
from headrace_common import wire
from headrace_common.adapter import Adapter
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError, RequestError
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import (
    LoadFailed,
    Loading,
    Message,
    Ping,
    Pong,
    Ready,
    Submit,
)
from headrace_common.plan import Begin, Chunk, ChunkResult, Drawn, StepPlan, StepResult
from headrace_common.sampling import Logprobs
from headrace_common.system.step_record import StepRecord
from headrace_common.wire import Start
from headrace_common.worker_jobs import Refusal
from headrace_engine.adapters import AdapterLoader
from headrace_engine.engine import Engine
from headrace_engine.scheduler.budget import resolve
from headrace_engine.scheduler.scheduler import Scheduler
from stress.simulated_server.faults import Faults
from stress.simulated_server.requests import MODEL
from stress.simulated_server.system import PROCESS, Process, SimpleQueue, Thread, sleep, world_loop
from stress.simulator.fake_runner import FakeRunner

LOAD_S = 0.5
LAYOUT = MemoryLayout(block_size=16, num_blocks=120)
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 4
VECTOR_SIZE = 3

_pids = itertools.count(1000)


class SimChild:
    """A simulated engine process, in place of `headrace.engines.child.Child`.

    The process has the real engine loop and scheduler. Only its runner computes no model.
    """

    def __init__(self, faults: Faults, on_start: "OnEngine") -> None:
        self.pid = next(_pids)
        self.config: ModelConfig
        self.has_started = False
        self._on_start = on_start
        self.reader = asyncio.StreamReader()
        self.step_record = StepRecord()
        self._faults = faults
        self._process = Process(f"engine {self.pid}")
        self._inbox = SimpleQueue()
        self._code: int | None = None
        self._exited = asyncio.Event()
        self._was_killed = self._is_mute = False
        self.has_loaded = False
        # Whether a fault makes a step slow, or keeps the engine from its next step.
        self.is_stuck = False
        # When each step ended.
        self.step_ends: list[float] = []
        self._suspects: tuple[SequenceId, ...] = ()
        self._salts: dict[int, str] = {}

    @classmethod
    async def spawn(cls, faults: Faults, on_start: "OnEngine") -> "SimChild":
        await asyncio.sleep(uniform(0.5, 5.0) if faults.hits("engine: slow spawn") else 0.01)
        if faults.hits("engine: cannot be started"):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return cls(faults, on_start)

    @property
    def is_running(self) -> bool:
        return self._code is None and not self._process.has_ended

    def send(self, message: Message) -> None:
        if self._code is not None:
            return
        # The engine decodes a copy, as another process does.
        decoded = wire._DECODER.decode(wire.encode(message)[4:])
        if isinstance(decoded, Start):
            self._start(decoded.config)
        elif isinstance(decoded, Ping):
            self._is_mute = self._is_mute or self._faults.hits("engine: answers no ping")
            if not self._is_mute:
                self.put(Pong(decoded.number))
        else:
            if isinstance(decoded, Submit):
                # The runner takes the first line for the name of an adapter.
                salt = decoded.salt if decoded.adapter else f"\n{decoded.salt}"
                self._salts.update((new.sequence_id, salt) for new in decoded.sequences)
                if decoded.adapter:
                    seed = adapted(decoded.sampling.seed, decoded.adapter.fingerprint)
                    sampling = msgspec.structs.replace(decoded.sampling, seed=seed)
                    decoded = msgspec.structs.replace(decoded, sampling=sampling)
            self._inbox.put(decoded)

    def kill(self) -> None:
        if self._code is None:
            self._was_killed = True
            self.die(-signal.SIGKILL)

    def die(self, code: int, cut: bytes = b"") -> None:
        """End the process. `cut` are the bytes that it could still send."""
        if self._code is not None:
            return
        self._code = code
        self._process.kill()
        self.reader.feed_data(cut)
        self.reader.feed_eof()
        self._exited.set()

    async def end(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._exited.wait()
        except TimeoutError:
            self.kill()
        self._suspects = self.step_record.read()
        self.step_record.close()

    def death_report(self) -> EngineDown:
        assert self._code is not None
        return EngineDown(
            "engine_failed",
            f"The engine ended with status {self._code}.",
            given_up=False,
            suspects=self._suspects,
            from_outside=self._code == -signal.SIGKILL and not self._was_killed,
        )

    # The methods below belong to the engine's process.

    def put(self, message: Message) -> None:
        frame = wire.encode(message)
        if self._code is None:
            self.reader.feed_data(frame)

    def num_unsent(self) -> int:
        """Return 0. The engine calls this before each step, so a stopped process stops here."""
        if self._faults.hits("engine: stops between two steps"):
            self._is_mute = self.is_stuck = True
            sleep(1e6)
        # Such an engine counts as hanging only after minutes, so each run has at most one.
        if self._faults.hits("engine: hangs between two steps"):
            self._faults.rates.pop("engine: hangs between two steps")
            self.is_stuck = True
            sleep(1e6)
        return 0

    def _start(self, config: ModelConfig) -> None:
        self.config, self.has_started = config, True
        self._on_start(self)
        token = PROCESS.set(self._process)
        try:
            Thread(target=self._run, args=(config,), name="engine").start()
        finally:
            PROCESS.reset(token)

    def _run(self, config: ModelConfig) -> None:
        self.put(Loading(0.5))
        sleep(LOAD_S)
        if self._faults.hits("engine: death while loading"):
            self.die(-signal.SIGKILL)
            return
        if world_loop().time() < self._faults.loads_fail_until:
            self._faults.note("engine: load failed")
            self.put(LoadFailed("load_failed", "The device is not available."))
            self.die(0)
            return
        ready, scheduler = _scheduler(config)
        runner = SimRunner(self, FakeRunner(LAYOUT, self._salts), self._faults)
        self.put(ready)
        self.has_loaded = True
        adapters = SimAdapters(runner)
        engine = Engine(scheduler, runner, self, self.step_record, adapters=adapters)
        engine.run(self._inbox)  # type: ignore[arg-type]
        self.die(0)


OnEngine = Callable[[SimChild], None]


def _scheduler(config: ModelConfig) -> tuple[Ready, Scheduler]:
    limits = resolve(config.scheduler, LAYOUT, "cpu", MAX_NUM_SEQS, MAX_MODEL_LEN)
    ready = Ready(
        lane="native-text",
        device="cpu",
        dtype="float32",
        vocab_size=1536,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        num_parameters=1000,
        weight_bytes=4000,
        layout=LAYOUT,
        fingerprint="0123456789ab",
        max_step_tokens=limits.max_step_tokens,
        max_stall_s=limits.max_stall_s,
        highest_stall_s=limits.max_stall_s,
        tasks=("generate", "embed", "score"),
        vector_size=VECTOR_SIZE,
    )
    return ready, Scheduler(config.scheduler, LAYOUT, limits)


def vector_of(token_ids: "array[int]") -> bytes:
    """Return a made-up embedding, packed as float32. It depends only on the tokens."""
    sums = (sum(token_ids[n::VECTOR_SIZE], n + 1) for n in range(VECTOR_SIZE))
    return array("f", sums).tobytes()


def adapted(seed: int, fingerprint: str) -> int:
    """Return the seed for tokens of an adapter, so that its answers differ from the model's."""
    return seed ^ int(fingerprint[:4], 16)


def logprob_of(token_id: int) -> float:
    """Return a made-up log probability. It depends only on the token."""
    return -token_id / 8


class SimAdapters(AdapterLoader):
    """The adapters of an engine. A simulated thread reads them."""

    def __init__(self, runner: "SimRunner") -> None:
        super().__init__(runner)
        self._thread = self  # type: ignore[assignment]

    def submit(self, read: Callable[[Adapter], Any], adapter: Adapter) -> "Future[Any]":
        """Read an adapter on another thread, as a thread pool does."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(read(adapter))
            except ModelError as error:
                done.set_exception(error)

        Thread(target=run, name="adapter").start()
        return done


class SimRunner:
    """A runner that takes time and fails; FakeRunner chooses the tokens."""

    def __init__(self, child: SimChild, runner: FakeRunner, faults: Faults) -> None:
        self._child, self._runner, self._faults = child, runner, faults
        # The fingerprints of the adapters that are in memory.
        self._adapters: set[str] = set()

    def read_adapter(self, adapter: Adapter) -> str:
        sleep(uniform(0.0, 0.5))
        if self._faults.hits("engine: adapter cannot be read"):
            raise ModelError("The adapter's file is damaged.")
        return adapter.fingerprint

    def put_adapter(self, fingerprint: str) -> None:
        self._adapters.add(fingerprint)

    def drop_adapter(self, fingerprint: str) -> None:
        self._adapters.remove(fingerprint)

    def launch(self, plan: StepPlan) -> "SimRunner":
        self._plan = plan
        return self

    def result(self) -> StepResult:
        faults, plan = self._faults, self._plan
        seconds = 0.01 + sum(
            5e-4 * c.length + 1e-8 * c.length * (2 * c.start + c.length) for c in plan.chunks
        )
        self._child.is_stuck = faults.hits("engine: slow step")
        if self._child.is_stuck:
            seconds *= 30
        if faults.hits("engine: hangs in a step"):
            # Only after minutes is a step overdue, so each run has at most one such step.
            faults.rates.pop("engine: hangs in a step")
            self._child.is_stuck = True
            sleep(1e6)
        if faults.hits("engine: death in a step"):
            sleep(seconds * world_loop().choose(4, "data") / 4)
            # The message of an earlier step may be cut by the death.
            cut = (
                wire.encode(Pong(1))[:5] if faults.hits("engine: message cut by its death") else b""
            )
            self._child.die((-signal.SIGSEGV, -signal.SIGKILL)[world_loop().choose(2, "data")], cut)
            sleep(1e6)
        sleep(seconds)
        self._child.is_stuck = False
        if faults.hits("engine: step error"):
            raise RuntimeError("a step failed")
        self._child.step_ends.append(world_loop().time())
        unread = {chunk.adapter for chunk in plan.chunks} - self._adapters - {""}
        assert not unread, f"computed with adapters that are not in memory: {unread}"
        result = self._runner.execute(plan, (seconds, ()), {})
        chunks = zip(plan.chunks, result.chunks, strict=True)
        whole = tuple(self._complete(chunk, it) for chunk, it in chunks)
        return msgspec.structs.replace(result, chunks=whole)

    def _complete(self, chunk: Chunk, result: ChunkResult) -> ChunkResult:
        """Add log probabilities, and the vector of a sequence that this chunk completes."""
        remembered = self._runner.remembered(chunk.sequence_id)
        begin, end = remembered.begin, chunk.start + chunk.length
        if begin.sampling.num_logprobs is not None:
            drawn = tuple(_with_logprobs(begin, it) for it in result.drawn)
            result = msgspec.structs.replace(result, drawn=drawn)
        if begin.sampling.pooling is None or end < begin.num_prompt:
            return result
        vector = vector_of(remembered.tokens[: begin.num_prompt])
        if begin.sampling.pooling.modes == ("score",):
            vector = array("f", [0.001 * (zlib.crc32(vector) % 1000)]).tobytes()
        return msgspec.structs.replace(result, vector=vector)


def _with_logprobs(begin: Begin, drawn: Drawn) -> Drawn:
    """Add a row to each token: the token itself, then the most likely tokens."""
    tops = range(3, 3 + (begin.sampling.num_logprobs or 0))
    ids = array("i", [it for token_id in drawn.token_ids for it in (token_id, *tops)])
    values = array("f", map(logprob_of, ids))
    logprobs = Logprobs(1 + len(tops), ids.tobytes(), values.tobytes())
    return msgspec.structs.replace(drawn, logprobs=logprobs)


class SimWorker:
    """A simulated worker process, in place of `headrace.workers.process.WorkerProcess`."""

    def __init__(self, start: bytes, faults: Faults) -> None:
        self.start = start
        self._faults = faults
        self._code: int | None = None
        self._is_busy = False

    @classmethod
    async def begin(
        cls, module: str, start: bytes, options: Sequence[str], *, faults: Faults
    ) -> "SimWorker":
        await asyncio.sleep(0.2)
        if faults.hits("worker: cannot be started"):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return cls(start, faults)

    @property
    def has_ended(self) -> bool:
        return self._code is not None

    async def ask(self, head: bytes, body: Body) -> Reply:
        assert not self._is_busy, "two jobs run in one worker process"
        self._is_busy = True
        try:
            return await self._do(head, body)
        finally:
            self._is_busy = False

    async def _do(self, head: bytes, body: Body) -> Reply:
        await asyncio.sleep(0.001 * (1 + world_loop().choose(4, "data")))
        if self._code is not None:
            raise EOFError
        if self._faults.hits("worker: death in a job"):
            self._code = (-signal.SIGKILL, 0)[world_loop().choose(2, "data")]
            raise EOFError
        if self._faults.hits("worker: job exceeds its limits"):
            self._code = -choice((signal.SIGPROF, signal.SIGVTALRM, signal.SIGABRT))
            raise EOFError
        if self._faults.hits("worker: slow job"):
            await asyncio.sleep(uniform(0.1, 10.0))
        if self._faults.hits("worker: hangs in a job"):
            await asyncio.sleep(15)
            raise TimeoutError
        return _answer(_jobs(self.start), head, b"".join(body))

    async def end(self, within_s: float = 1.0) -> int:
        if self._code is None:
            self._code = 0
        return self._code


@functools.lru_cache(maxsize=32)
def _jobs(start: bytes) -> Jobs:
    start_type = tuple[tuple[ModelConfig, ...], tuple[str, ...]]
    configs, aliases = msgspec.msgpack.decode(start, type=start_type)
    texts = [
        WorkerModel(
            (*names_of(config), *adapters_of(config)),
            functools.partial(_text_model, config),
            contextlib.nullcontext,
            paths_of(config),
        )
        for config in configs
    ]
    return Jobs(*texts, aliases=Aliases(aliases))


def _text_model(config: ModelConfig) -> TextModel:
    """Return the text side of a model. All models have the files of the model in the package."""
    made = copy.copy(packaged_text())
    made.root, made.names, made.paths = root_of(config), names_of(config), paths_of(config)
    return made


@functools.lru_cache(maxsize=1)
def packaged_text() -> TextModel:
    return TextModel(ModelConfig(model=MODEL))


def _answer(jobs: Jobs, head: bytes, body: bytes) -> Reply:
    try:
        return b"", perform(jobs, head, body)
    except RequestError as error:
        return msgspec.msgpack.encode(Refusal.of(error)), b""
