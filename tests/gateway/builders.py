"""Builders of requests, records and logs, and a generation whose streams a test writes."""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from starlette.applications import Starlette

from headrace.batches.folder import temporary_batch_store
from headrace.batches.store import BatchStore
from headrace.engines.client import EngineUp
from headrace.fleet.engine_life import EngineLife
from headrace.fleet.engine_users import EngineUsers
from headrace.fleet.load_progress import LoadProgressWatch
from headrace.fleet.model_list import ModelChanges, ModelList, ModelSources
from headrace.fleet.pulls import Pull, Pulls
from headrace.fleet.roster import Roster
from headrace.gateway.auth import Auth
from headrace.generation.adapters import AdapterService
from headrace.generation.readers import ReaderPause
from headrace.generation.registry import FinishedStream
from headrace.generation.vectors import Check, Vectors
from headrace.metrics.metrics import Metrics
from headrace.protocols import requests
from headrace.protocols.dialect import Dialect, dialect_of
from headrace.protocols.worker import Jobs
from headrace.server import build_gateway
from headrace.streams.events import (
    Accepted,
    AnyEvent,
    ChoiceEnd,
    Error,
    Finish,
    Progress,
    TokenLogprob,
    Tokens,
)
from headrace.streams.log import MemoryLog, follow
from headrace.streams.record import Names, Record
from headrace.streams.stores.memory import MemoryStore
from headrace.streams.usage import UsageCounter
from headrace.text.encoder import Encoder
from headrace.text.infill import InfillMarks
from headrace.text.model_names import Models
from headrace.workers.input_memory import InputMemory
from headrace.workers.pool import ThreadJobRunner
from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.sentence_transformers import SentenceSpec
from headrace_common.checkpoints.spec import Defaults
from headrace_common.config.settings import ModelConfig, ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Ready
from headrace_common.pieces import REASONING, ChannelPiece
from headrace_common.request import Chat, Prompt, Request, ResponseOptions, Text
from headrace_common.sampling import Sampling
from headrace_common.vector_request import VectorRequest
from headrace_common.worker_jobs import CheckedBody, EncodePairs, EncodePrompts

_NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.floats(-1e308, 1e308)
JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
"""Any value that a strict JSON body can contain."""

CONFIG = ServerConfig()
STREAM_ID = "chatcmpl-0123456789abcdef0123456789abcdef"
READY = Ready(
    lane="native-text",
    device="cpu",
    dtype="float32",
    vocab_size=256,
    max_model_len=128,
    max_num_seqs=8,
    num_parameters=1000,
    weight_bytes=4000,
    layout=MemoryLayout(),
    fingerprint="3c1d5e8f9a02",
    tasks=("generate", "embed", "score"),
    vector_size=2,
)
SPEC = SimpleNamespace(
    architecture="LlamaForCausalLM",
    max_positions=64,
    config={"hidden_size": 32},
    vocab_size=256,
    end_token_ids=(2,),
    is_gguf=False,
)


class Letters:
    """A fake tokenizer in which each byte is a token."""

    vocab_size = 256
    bos_token, eos_token = "<s>", "</s>"
    special_tokens: ClassVar[dict[str, str]] = {"bos_token": bos_token, "eos_token": eos_token}
    infill_marks: InfillMarks | None = None
    cut_marks: ClassVar[frozenset[str]] = frozenset()

    def encode(self, text: str, add_special_tokens: bool) -> "array[int]":
        return array("i", [1] * add_special_tokens + list(text.encode()))

    def encode_pair(self, first: str, second: str) -> "tuple[array[int], int]":
        one, other = first.encode(), second.encode()
        return array("i", [1, *one, 2, *other]), len(one) + 2

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return None


class Lines:
    """A fake chat template that renders each message as one line with its role and content."""

    source = "{{ role }}: {{ content }}"
    shows_system = shows_later_system = True

    def render(self, chat: Chat) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in chat.messages)


@dataclass
class FakeModel:
    names: tuple[str, ...] = ("headrace-mini", "org/other")
    paths: frozenset[str] = frozenset({"/models/mini.gguf"})
    root: str = "headrace-mini"
    created: int = 1790000000
    number: int = 0
    # Grammars are checked with the tokenizer in this folder.
    folder: Path = field(default_factory=lambda: find_model("headrace-mini"))
    defaults: Defaults | None = None
    vocab_size: int = 256
    has_vision: bool = False
    has_source: bool = False
    tool_format: str = "hermes"
    reasoning_format: str = ""
    broken_texts: tuple[str, ...] = ()
    prefills_assistant: bool = False
    ready: Ready | None = READY
    tokenizer: Letters = field(default_factory=Letters)
    template: Lines | None = field(default_factory=Lines)
    spec: Any = field(default_factory=lambda: SPEC)
    sentences: SentenceSpec = field(default_factory=lambda: SentenceSpec(dimensions=None))
    cuts_any: bool = False
    embeds_units: bool = True

    adapters: ClassVar[dict[str, Any]] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.ready.tasks if self.ready else ("generate",)

    @property
    def num_parameters(self) -> int | None:
        return self.ready.num_parameters if self.ready else None

    @property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer)  # type: ignore[arg-type]

    @property
    def max_model_len(self) -> int:
        return self.ready.max_model_len if self.ready else 64


class FakeReader:
    def __init__(self, stream: "FakeStream", after: int) -> None:
        self._stream = stream
        self._events = follow(stream.log, after)

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self._events

    def sent(self, event: AnyEvent) -> None:
        self._stream.sent.append(event)


class FakeAudience:
    """A fake audience of a stream that counts the readers that left."""

    def __init__(self, stream: "FakeStream") -> None:
        self.pause = ReaderPause()
        self.has_seen_tokens = False
        self._stream = stream

    @contextlib.asynccontextmanager
    async def reader(self, after: int = -1) -> AsyncIterator[FakeReader]:
        try:
            yield FakeReader(self._stream, after)
        finally:
            self._stream.num_left += 1


class FakeStream:
    """A stream whose log the test writes; records the sent events and counts lost readers."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.log = MemoryLog()
        self.events: list[AnyEvent] = []
        self.sent: list[AnyEvent] = []
        self.beats: asyncio.Queue[str] = asyncio.Queue()
        self.num_left = 0
        self.audience = FakeAudience(self)

    async def write(self, *events: AnyEvent) -> None:
        await self.log.append(len(self.events), numbered(events, len(self.events)))
        self.events += events

    def beat(self, form: str, interval_s: float) -> None:
        self.beats.put_nowait(form)


class NoStreams:
    """A fake registry without streams."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    async def find(self, owner: str, by: object, suspended: bool = False) -> None:
        return None

    async def find_equal(self, names: Names) -> None:
        return None

    async def stop(self, found: object) -> None:
        raise AssertionError("nothing was found")

    async def discard(self, owner: str, by: object) -> None:
        pass

    async def find_conversations(self, owner: str, names: list[str]) -> list[FakeStream]:
        return []


class OneStream(NoStreams):
    """A fake registry that returns the same stream for every lookup."""

    def __init__(self, found: FinishedStream) -> None:
        self._found = found

    async def find(self, owner: str, by: object, suspended: bool = False) -> FinishedStream:  # type: ignore[override]
        return self._found

    async def reach(self, found: FinishedStream, seq: int) -> int:
        return found.log.next_seq

    async def find_conversations(self, owner: str, names: list[str]) -> list[FinishedStream]:  # type: ignore[override]
        return [self._found]

    async def stop(self, found: object) -> None:
        """Do nothing: the stream has ended."""

    forget = stop


class FakeHost:
    """A fake host whose engine is up; a test sets its status."""

    def __init__(self, model: FakeModel, metrics: Metrics) -> None:
        self.model, self.known = model, model
        self.config = ModelConfig()
        self.names, self.paths = model.names, model.paths
        self.name, self.ready = model.names[0], model.ready
        self.root, self.num_bytes = model.root, 4000
        self.is_here = True
        self.metrics = metrics
        self.loading = LoadProgressWatch()
        self.engine = EngineLife(EngineUsers(self.loading), self.loading, metrics.engine)
        self.engine.state, self.engine.num_starts = "ok", 1
        self.engine.up = EngineUp(model.ready, pid=4711) if model.ready else None
        self.streams: list[Any] = []


class FakeVectors:
    """A fake that returns the vector [0.6, 0.8] for each input and the score 0 for each pair."""

    def __init__(self, generation: "FakeGeneration") -> None:
        self._generation = generation
        self.asked: list[VectorRequest] = []

    async def make(self, request: VectorRequest, check: Check = lambda model: None) -> Vectors:
        model: Any = self._generation.fleet.hosts.get(request.model).model
        check(model)
        self.asked.append(request)
        job = EncodePairs if request.task == "score" else EncodePrompts
        encoded = await self._generation.work.do(job(64, model.names[0]), [request.packed])
        vector = array("f", [0] if request.task == "score" else [0.6, 0.8]).tobytes()
        return Vectors(model, (vector,) * len(encoded.prompts), 7)


class FakeFleet:
    """A fake fleet with one loaded model."""

    def __init__(self, host: FakeHost) -> None:
        self.pinned = host
        self.hosts = Models((host,))
        self.roster = Roster((host,))  # type: ignore[arg-type]

    async def resolve(self, name: str) -> str:
        return self.hosts.resolve(name)

    @contextlib.asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[FakeHost]:
        yield self.hosts.get(name)

    def need(self, host: FakeHost) -> None:
        """Do nothing: the model is loaded."""


class FakeQueues:
    """Fake queues whose generation drains while they are stopped."""

    def __init__(self, generation: "FakeGeneration") -> None:
        self._generation = generation
        self.inputs = InputMemory()

    def stop(self) -> None:
        self._generation.state = "draining"

    def admit_again(self) -> None:
        self._generation.state = "ok"


class NoPulls(Pulls):
    """Fake downloads from a hub without models."""

    def begin(self, model: str) -> Pull:
        raise RequestError("model_not_found", "It is not on the hub.", "model")


class FakeGeneration:
    """A fake generation; each new stream contains `accepted` and the events of `script`."""

    def __init__(self, *script: AnyEvent, model: FakeModel | None = None) -> None:
        self.metrics = Metrics()
        self.fleet = FakeFleet(FakeHost(model or FakeModel(), self.metrics))
        self.state = "ok"
        self.queues = FakeQueues(self)
        configs = (ModelConfig(),)
        sources = ModelSources(configs, NoPulls(None), lambda: configs, None, True)
        self.desired = ModelList(ModelChanges(sources, FakeHost, len), self.fleet)  # type: ignore[arg-type]
        self.script = script
        self.refusal: RequestError | None = None
        self.requests: list[Request] = []
        self.work = ThreadJobRunner(Jobs(self.fleet.hosts.first.model))  # type: ignore[arg-type]
        self.streams: NoStreams = NoStreams()
        self.vectors = FakeVectors(self)
        self.adapters = AdapterService(self.fleet, self.streams, lambda: None)  # type: ignore[arg-type]

    def streams_of(self, host: FakeHost) -> list[Any]:
        return host.streams

    async def host_for(self, name: str | None, waits: bool) -> FakeHost:
        return self.fleet.hosts.get(name)

    async def open(
        self, request: Request, names: Names, checked: CheckedBody, stream_id: StreamId
    ) -> FakeStream:
        self.requests.append(request)
        if self.refusal:
            raise self.refusal
        stream = FakeStream(make_record(request))
        await stream.write(accepted(stream.record), *self.script)
        return stream


def app_of(
    generation: Any, config: ServerConfig = CONFIG, shelf: BatchStore | None = None
) -> Starlette:
    """Build the app over a generation; without `shelf`, files and batches are temporary."""
    shelf = shelf or temporary_batch_store()
    return build_gateway(generation, config, shelf, Auth(config.http)).app


def make_request(route: str = "/v1/chat/completions", **changes: Any) -> Request:
    sampling = Sampling(seed=7, num_logprobs=changes.pop("num_logprobs", None))
    options = ResponseOptions(**({"heartbeat": True} | changes.pop("response_options", {})))
    prompt = (
        Text("hi") if route == "/v1/completions" else Chat(({"role": "user", "content": "hi"},))
    )
    request = Request(route, "headrace-mini", (prompt,), sampling, response_options=options)
    return msgspec.structs.replace(request, **changes)


def parsed(
    schema: ModuleType | Dialect, body: dict[str, Any], model: FakeModel | None = None
) -> Request:
    """Parse a body into a request with its prompts."""
    body_checked = requests.pack(schema, schema.read(body))
    request = requests.to_request(schema, body_checked, model or FakeModel())  # type: ignore[arg-type]
    prompts = msgspec.msgpack.decode(body_checked.packed, type=tuple[Prompt, ...])
    return msgspec.structs.replace(request, prompts=prompts)


def make_record(request: Request) -> Record:
    return Record(
        id=StreamId(dialect_of(request.route).ID_PREFIX + STREAM_ID.partition("-")[2]),
        created=1790000000,
        request=request,
        prompts=tuple(array("i", [104, 105]).tobytes() for _ in request.prompts),
        system_fingerprint="fp_3c1d5e8f9a02",
    )


def accepted(record: Record) -> Accepted:
    request = record.request
    return Accepted(
        seq=0,
        at_ms=0,
        id=record.id,
        route=request.route,
        model=request.model,
        created=record.created,
        mode="fresh",
        prompt_tokens=record.num_prompt_tokens,
        n=request.n,
        seed=request.sampling.seed,
    )


def progress(processed: int, total: int = 2048, cache: int = 512, time_ms: int = 0) -> Progress:
    return Progress(
        seq=0,
        at_ms=time_ms,
        choice=0,
        total=total,
        cache=cache,
        processed=processed,
        time_ms=time_ms,
    )


def tokens(text: str, *ids: int, at_ms: int = 0, **more: Any) -> Tokens:
    pieces = (ChannelPiece(text),) if text else ()
    return Tokens(seq=0, at_ms=at_ms, **({"choice": 0} | more), ids=ids, pieces=pieces)


def piece(text: str, channel: str, call: int = -1, name: str = "") -> Tokens:
    """Return one token of a channel other than content."""
    pieces = (ChannelPiece(text, channel, call, name),)
    is_thought = channel == REASONING
    return Tokens(seq=0, at_ms=0, choice=0, ids=(1,), pieces=pieces, num_reasoning=int(is_thought))


def ended(reason: str = "stop", stop: str | int | None = None, **more: Any) -> Tokens:
    return tokens("", *more.pop("ids", ()), end=ChoiceEnd(reason, stop), **more)


def error(code: str = "engine_failed") -> Error:
    kind = RequestError(code, "").kind
    message = "The engine stopped and could not be restarted."
    return Error(
        seq=0,
        at_ms=0,
        code=code,
        type=kind.type,
        message=message,
        status=kind.status,
        retryable=kind.retry,
    )


def logprob(text: str | bytes, value: float | None = -0.5, *top: TokenLogprob) -> TokenLogprob:
    raw = text.encode() if isinstance(text, str) else text
    return TokenLogprob(raw[0], raw.decode(errors="replace"), raw, value, top)


def log_of(record: Record, *events: AnyEvent) -> list[AnyEvent]:
    """Return a whole log: `accepted`, these events with numbers, and the resulting `finish`."""
    made = [accepted(record), *numbered(events, 1)]
    if made and isinstance(made[-1], Error):
        return made
    tally = UsageCounter()
    for event in made:
        tally.feed(event)
    by_choice = {e.choice: e.end for e in made if isinstance(e, Tokens) and e.end}
    ends = tuple(by_choice[choice] for choice in sorted(by_choice))
    usage, timings = tally.usage, tally.timings
    seq, at_ms = len(made), made[-1].at_ms
    return [*made, Finish(seq=seq, at_ms=at_ms, ends=ends, usage=usage, timings=timings)]


def ended_stream(record: Record, *events: AnyEvent) -> FinishedStream:
    """Return a finished stream with a whole log of these events."""
    log = MemoryLog()
    log.tail.extend(log_of(record, *events))
    return FinishedStream(record, log)


def numbered(events: Sequence[AnyEvent], first: int) -> list[AnyEvent]:
    return [msgspec.structs.replace(e, seq=first + i) for i, e in enumerate(events)]
