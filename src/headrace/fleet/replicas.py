"""Runs several engines of one model as if they were one engine."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from headrace.engines.client import (
    EngineClient,
    EngineDown,
    EngineResized,
    EngineUp,
    NewsQueue,
    StateNews,
)
from headrace.fleet.replica import NOTHING, Replica, ReplicaCount, counts_of, ready_of, total
from headrace.fleet.request_queue import Cancels, RequestQueue
from headrace_common.config.settings import ModelConfig
from headrace_common.messages import (
    AdapterRead,
    Cancel,
    DropAdapter,
    LoadAdapter,
    Loading,
    Outputs,
    Ready,
    Status,
    Submit,
)

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.5
_MOVED = "The engine is being replaced; its streams continue on another engine."


class Replicas:
    """An EngineClient that distributes requests over several engines; `start` creates an engine.

    Each engine only gets as many sequences as the engine can run at the same time. All other
    sequences wait here in one queue. When an engine dies, the engine's streams are notified and
    submit their unfinished sequences again. When no engine is left, all streams are notified.
    """

    def __init__(
        self,
        start: Callable[[], EngineClient],
        fewest: int,
        most: int,
        idle_s: float | None = None,
    ) -> None:
        self._start = start
        self._count = ReplicaCount(fewest, most, idle_s)
        # Seconds in which streams have to end when their replica is removed.
        self._leave_s = 0.0
        self.news = NewsQueue()
        self._queue = RequestQueue()
        self._replicas: dict[int, Replica] = {}
        # Replaced replicas whose engines have not ended yet.
        self._leaving: list[Replica] = []
        self._numbers = itertools.count()
        # The sum of the counters of dead engines.
        self._retired = NOTHING
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        for _ in range(fewest):
            self._add()
        self._spawn(self._scale())

    # Methods that the model's host calls:

    def submit(self, submit: Submit) -> None:
        if not self._has_engine:
            # The request is dropped here. As with a single engine, the caller submits the request
            # again when an engine is up.
            return
        self._queue.ask(submit, self._ready().layout)
        self._assign()

    def cancel(self, cancel: Cancel) -> None:
        """Cancel sequences.

        Queued sequences end immediately. A running sequence ends when its engine has released the
        sequence.
        """
        ended, running = self._queue.cancel(cancel)
        self._cancel(running)
        if ended:
            self.news.put(Outputs(finished=ended))
            self._assign()

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        """Send a message to all engines.

        Only the first answer counts, since all engines read the same files.
        """
        for it in self._replicas.values():
            it.client.adapt(message)

    def _cancel(self, running: Cancels) -> None:
        for number, cancel in running.items():
            self._replicas[number].client.cancel(cancel)

    async def close(self) -> None:
        self._is_closing = True
        every = (*self._replicas.values(), *self._leaving)
        await asyncio.gather(*(it.client.close() for it in every))
        self._end()

    def _end(self) -> None:
        self._is_closing = True
        for it in self._replicas.values():
            it.settled.set()
        for task in self._tasks:
            task.cancel()
        self.news.end(None)

    def all(self) -> list[Replica]:
        """Return the replicas in order of their numbers."""
        for number, it in self._replicas.items():
            it.take(self._queue.placement.num_taken(number))
        return list(self._replicas.values())

    def resize(self, fewest: int, most: int, within_s: float) -> None:
        """Set the smallest and the largest number of engines.

        Surplus engines are removed one after another. A surplus engine gets no new requests, and
        ends once its streams have ended. Streams that still run after `within_s` seconds move to
        another engine.
        """
        self._count.limit(fewest, most)
        self._leave_s = within_s

    async def replace(self, number: int, within_s: float) -> None:
        """Replace the engine that has this number with a new engine, if there is such an engine.

        The old engine's streams have `within_s` seconds to end. Streams that still run afterwards
        pause and move to another engine. If no other engine is up, the new engine is started
        first.
        """
        # Nothing would close an engine that is started after `close`.
        if (old := self._replicas.get(number)) is None or self._is_closing:
            return
        others = [it for it in self._replicas.values() if it is not old]
        if not any(it.up for it in others):
            # Mark the old engine as leaving first. Otherwise, there is one engine too many, and the
            # new one could be removed while it loads.
            old.leave()
            others.append(self._add())
            await others[-1].settled.wait()
            if not any(it.up for it in self._replicas.values() if it is not old):
                old.stay()
                return
        if self._replicas.get(number) is not old:
            # The old engine was removed during the wait, so there is nothing left to replace.
            return
        if old.up is not None:
            self._queue.placement.drain(number)
            old.emptied.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    if self._queue.placement.num_taken(number):
                        await old.emptied.wait()
        self._on_lost(old, EngineDown("engine_replaced", _MOVED, given_up=False, from_outside=True))
        self._replicas.pop(number, None)
        self._leaving.append(old)
        try:
            await old.client.close()
        finally:
            self._leaving.remove(old)
        if len(self._replicas) < self._count.fewest and not self._is_closing:
            self._add()

    # Methods that create engines and handle their messages:

    def _add(self) -> Replica:
        made = Replica(next(self._numbers), self._start())
        self._replicas[made.number] = made
        deliver, on_news = partial(self._deliver, made), partial(self._on_news, made)
        made.client.news.subscribe(deliver, on_news, self._on_failure)
        return made

    def _deliver(self, replica: Replica, outputs: Outputs) -> None:
        if not self._is_closing and replica.number in self._replicas:
            self.news.put(outputs)
            self._release(outputs)

    def _on_news(self, replica: Replica, news: StateNews) -> None:
        if self._is_closing or replica.number not in self._replicas:
            return
        if isinstance(news, Status):
            self._on_status(replica, news)
        elif isinstance(news, AdapterRead) or (isinstance(news, Loading) and not self._has_engine):
            self.news.put(news)
        elif isinstance(news, EngineUp):
            self._on_up(replica, news)
        elif isinstance(news, EngineDown):
            self._on_down(replica, news)

    def _on_failure(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.news.end(failure)

    @property
    def _has_engine(self) -> bool:
        return any(it.up for it in self._replicas.values())

    def _on_up(self, replica: Replica, news: EngineUp) -> None:
        was_up = self._has_engine
        replica.came_up(news, asyncio.get_running_loop().time())
        layout = news.ready.layout
        self._queue.placement.open(replica.number, news.ready.max_num_seqs, layout.num_blocks)
        if was_up:
            self._report_size(has_started=True)
            self._assign()
        else:
            self.news.put(msgspec.structs.replace(news, ready=self._ready()))

    def _on_down(self, replica: Replica, news: EngineDown) -> None:
        if news.given_up:
            logger.error("A replica was given up. %s", news.message)
            del self._replicas[replica.number]
            self._count.give_up(asyncio.get_running_loop().time())
            replica.settled.set()
        self._on_lost(replica, news)
        if not self._replicas:
            # The host has received the end of the model, and does not close this object.
            self._end()

    def _on_lost(self, replica: Replica, news: EngineDown) -> None:
        """Notify the streams of a lost replica. If no other engine is up, notify all streams."""
        was_up = replica.up
        if (life := replica.went_down()) is not None:
            self._retired = total((self._retired, counts_of(life)))
        lost, running = self._queue.close(replica.number)
        if self._has_engine:
            if was_up:
                self._cancel(running)
                self.news.put(msgspec.structs.replace(news, given_up=False, lost=lost))
                self._report_size()
                self._assign()
        elif was_up or (news.given_up and not self._replicas):
            self._queue, self._retired = RequestQueue(), NOTHING
            self.news.put(msgspec.structs.replace(news, given_up=not self._replicas))

    def _assign(self) -> None:
        for number, part in self._queue.placed():
            self._replicas[number].client.submit(part)

    def _release(self, outputs: Outputs) -> None:
        for end in outputs.finished:
            self._queue.release(end.sequence_id)
        if outputs.finished:
            self._assign()
            for it in self.all():
                if not it.num_taken:
                    it.emptied.set()

    def _ready(self) -> Ready:
        return ready_of(it.up.ready for it in self._replicas.values() if it.up)

    def _report_size(self, has_started: bool = False) -> None:
        first = next(it.up for it in self._replicas.values() if it.up)
        self.news.put(EngineResized(self._ready(), first.pid, has_started))

    def _on_status(self, replica: Replica, status: Status) -> None:
        replica.show(status)
        self._queue.placement.set_free_blocks(replica.number, status.blocks_free)
        known = [it.status for it in self._replicas.values() if it.status]
        whole = total((*known, self._retired, self._queue.status()))
        self.news.put(msgspec.structs.replace(whole, steps=status.steps))

    async def _scale(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self._is_closing:
            every, has_queue = self.all(), bool(self._queue.placement.waiting())
            if self._count.needs_more(clock(), every, has_queue):
                self._add()
            elif (spare := self._count.spare(clock(), every)) is not None:
                spare.leave()
                self._spawn(self.replace(spare.number, self._leave_s))
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="replicas")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._on_failure(task.exception())


def between(config: ModelConfig) -> tuple[int, int]:
    """Return the smallest and the largest number of replicas of a loaded model."""
    fewest = config.replicas if config.min_replicas is None else config.min_replicas
    return max(1, fewest), config.replicas
