"""Several engines of one model as one: deals out requests, and moves them when an engine dies."""

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
from headrace.fleet.replica import Replica, ReplicaCount, counts_of, ready_of, total
from headrace.fleet.request_line import Cancels, RequestLine
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
_NOTHING = Status(0, 0, 0, 0, 0, 0)
_MOVED = "The engine is replaced; its streams go on at another."


class Replicas:
    """An EngineClient over engines that `start` makes, each an EngineClient itself.

    Each engine runs what it has places for; the rest waits here, in one line. An engine's death is
    told to the streams it ran, which submit again what is left of them; with no engine left, it is
    told to all.
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
        self._leave_s = 0.0  # what the streams of those that are too many have to end
        self.news = NewsQueue()
        self._line = RequestLine()
        self._replicas: dict[int, Replica] = {}
        self._numbers = itertools.count()
        self._retired = _NOTHING  # counts of engines that have died
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        for _ in range(fewest):
            self._add()
        self._spawn(self._scale())

    # an engine, to its host

    def submit(self, submit: Submit) -> None:
        if not self._has_engine:
            return  # as with one engine: callers submit again when one is up
        self._line.ask(submit, self._ready().layout)
        self._place()

    def cancel(self, cancel: Cancel) -> None:
        """Ends sequences in line at once, and the others when their engine has let go."""
        ended, running = self._line.cancel(cancel)
        self._cancel(running)
        if ended:
            self.news.put(Outputs(finished=ended))
            self._place()

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        """All engines hear it; the first answer counts, since all read the same files."""
        for it in self._replicas.values():
            it.client.adapt(message)

    def _cancel(self, running: Cancels) -> None:
        for number, cancel in running.items():
            self._replicas[number].client.cancel(cancel)

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(it.client.close() for it in self._replicas.values()))
        for task in self._tasks:
            task.cancel()
        self.news.end(None)

    def all(self) -> list[Replica]:
        """The replicas, by number."""
        for number, it in self._replicas.items():
            it.num_taken = self._line.placement.num_taken(number)
        return list(self._replicas.values())

    def resize(self, fewest: int, most: int, within_s: float) -> None:
        """Sets the smallest and largest number of engines.

        Of those that are too many, one after the other takes no more requests, and leaves once
        its streams have ended; those that have not after `within_s` go on at another engine.
        """
        self._count.fewest, self._count.most, self._leave_s = fewest, most, within_s

    async def replace(self, number: int, within_s: float) -> None:
        """Puts a fresh engine in the place of this one, if there is one of that number.

        What it runs has `within_s` to end. The rest goes on at another engine, after a gap; where
        there is no other, the fresh one starts first.
        """
        if (old := self._replicas.get(number)) is None:
            return
        others = [it for it in self._replicas.values() if it is not old]
        if not any(it.up for it in others):
            others.append(self._add())
            await others[-1].was_up.wait()
        if self._replicas.get(number) is not old:
            return  # it has died meanwhile, and is started again
        if old.up is not None:
            self._line.placement.drain(number)
            old.emptied.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    if self._line.placement.num_taken(number):
                        await old.emptied.wait()
        self._lose(old, EngineDown("engine_replaced", _MOVED, given_up=False, from_outside=True))
        self._replicas.pop(number, None)
        await old.client.close()
        if len(self._replicas) < self._count.fewest and not self._is_closing:
            self._add()

    # what engines say

    def _add(self) -> Replica:
        made = Replica(next(self._numbers), self._start())
        self._replicas[made.number] = made
        deliver, hear = partial(self._deliver, made), partial(self._hear, made)
        made.client.news.hand_to(deliver, hear, self._has_failed)
        return made

    def _deliver(self, replica: Replica, outputs: Outputs) -> None:
        if not self._is_closing and replica.number in self._replicas:
            self.news.put(outputs)
            self._release(outputs)

    def _hear(self, replica: Replica, news: StateNews) -> None:
        if self._is_closing or replica.number not in self._replicas:
            return
        if isinstance(news, Status):
            self._show(replica, news)
        elif isinstance(news, AdapterRead) or (isinstance(news, Loading) and not self._has_engine):
            self.news.put(news)
        elif isinstance(news, EngineUp):
            self._is_up(replica, news)
        elif isinstance(news, EngineDown):
            self._is_down(replica, news)

    def _has_failed(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.news.end(failure)

    @property
    def _has_engine(self) -> bool:
        return any(it.up for it in self._replicas.values())

    def _is_up(self, replica: Replica, news: EngineUp) -> None:
        was_up = self._has_engine
        replica.came_up(news, asyncio.get_running_loop().time())
        layout = news.ready.layout
        self._line.placement.open(replica.number, news.ready.max_num_seqs, layout.num_blocks)
        if was_up:
            self._tell_size(has_started=True)
            self._place()
        else:
            self.news.put(msgspec.structs.replace(news, ready=self._ready()))

    def _is_down(self, replica: Replica, news: EngineDown) -> None:
        if news.given_up:
            logger.error("A replica was given up. %s", news.message)
            del self._replicas[replica.number]
            self._count.give_up(asyncio.get_running_loop().time())
        self._lose(replica, news)

    def _lose(self, replica: Replica, news: EngineDown) -> None:
        """Tells the streams of a lost replica; tells all, if no other engine is up."""
        was_up, replica.up = replica.up, None
        if (life := replica.status) is not None:
            self._retired, replica.status = total((self._retired, counts_of(life))), None
        lost, running = self._line.close(replica.number)
        if self._has_engine:
            if was_up:
                self._cancel(running)
                self.news.put(msgspec.structs.replace(news, given_up=False, lost=lost))
                self._tell_size()
                self._place()
        elif was_up or (news.given_up and not self._replicas):
            self._line, self._retired = RequestLine(), _NOTHING
            self.news.put(msgspec.structs.replace(news, given_up=not self._replicas))

    def _place(self) -> None:
        for number, part in self._line.placed():
            self._replicas[number].client.submit(part)

    def _release(self, outputs: Outputs) -> None:
        for end in outputs.finished:
            self._line.release(end.sequence_id)
        if outputs.finished:
            self._place()
            for it in self.all():
                if not it.num_taken:
                    it.emptied.set()

    def _ready(self) -> Ready:
        return ready_of(it.up.ready for it in self._replicas.values() if it.up)

    def _tell_size(self, has_started: bool = False) -> None:
        first = next(it.up for it in self._replicas.values() if it.up)
        self.news.put(EngineResized(self._ready(), first.pid, has_started))

    def _show(self, replica: Replica, status: Status) -> None:
        replica.status = status
        self._line.placement.set_free_blocks(replica.number, status.blocks_free)
        known = [it.status for it in self._replicas.values() if it.status]
        whole = total((*known, self._retired, self._line.status()))
        self.news.put(msgspec.structs.replace(whole, steps=status.steps))

    async def _scale(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self._is_closing:
            every, has_line = self.all(), bool(self._line.placement.waiting())
            if self._count.needs_more(clock(), every, has_line):
                self._add()
            elif (spare := self._count.spare(clock(), every)) is not None:
                spare.is_leaving = True
                self._spawn(self.replace(spare.number, self._leave_s))
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="replicas")
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._has_failed(task.exception())


def between(config: ModelConfig) -> tuple[int, int]:
    """The fewest and the most engines that a model shall have while it is loaded."""
    fewest = config.replicas if config.min_replicas is None else config.min_replicas
    return max(1, fewest), config.replicas
