"""Several engines of one model as one: deals out requests, and moves them when an engine dies."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any

import msgspec

from headrace.config.settings import ModelConfig
from headrace.core.ids import SequenceId
from headrace.core.messages import Cancel, Finished, Loading, Outputs, Ready, Status, Submit
from headrace.engine.client import (
    EngineClient,
    EngineDown,
    EngineNews,
    EngineResized,
    EngineUp,
    NewsQueue,
)
from headrace.fleet.placement import Placement, Ticket, Want, prefix_names
from headrace.fleet.replica import Replica, Retired, ready_of, status_of

logger = logging.getLogger(__name__)

PRIORITY_LEVEL_S = 10.0  # what one level is worth, as in an engine's own queue
_LOOK_INTERVAL_S = 0.5
_GROW_AFTER_S = 1.0  # with requests in line and every engine up
_AGAIN_S = 30.0  # after an engine was given up
_MOVED = "The engine is replaced; its streams go on at another."


class Replicas:
    """An EngineClient over engines that `start` makes, each an EngineClient itself.

    There are between `fewest` and `most`. One more starts while requests are in line, and one that
    had nothing to do for `idle_s` leaves. Each engine runs what it has places for; the rest waits
    here, in one line. An engine's death is told to the streams it ran, which submit again what is
    left of them; with no engine left, it is told to all.
    """

    def __init__(
        self,
        start: Callable[[], EngineClient],
        fewest: int,
        most: int,
        idle_s: float | None = None,
    ) -> None:
        self._start = start
        self._fewest, self._most, self._idle_s = max(1, fewest), most, idle_s
        self._news = NewsQueue()
        self._placement = Placement()
        self._replicas: dict[int, Replica] = {}
        self._numbers = itertools.count()
        self._new_tickets = itertools.count()
        self._tickets: dict[SequenceId, Ticket] = {}
        self._parts: dict[Ticket, Submit] = {}  # with the sequences that have not ended
        self._retired = Retired()
        self._moved: set[int] = set()  # replicas that must not be started again
        self._leaving: set[int] = set()  # those that are too many
        self._leave_s = 0.0  # what their streams have to end
        self._wanted_since: float | None = None
        self._again_at = 0.0
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        for _ in range(self._fewest):
            self._add()
        self._spawn(self._scale())

    # an engine, to its host

    def submit(self, submit: Submit) -> None:
        """Each prompt's choices stay together, since they share it; prompts may part."""
        if not self._has_engine:
            return  # as with one engine: callers submit again when one is up
        for part in _by_prompt(submit):
            ticket = next(self._new_tickets)
            self._parts[ticket] = part
            self._tickets |= {new.sequence_id: ticket for new in part.sequences}
            self._placement.ask(ticket, self._want(part))
        self._place()

    def cancel(self, cancel: Cancel) -> None:
        """Ends sequences in line at once, and the others when their engine has let go."""
        by_replica: dict[int, list[SequenceId]] = {}
        ended = []
        for id in cancel.sequence_ids:
            if (ticket := self._tickets.get(id)) is None:
                continue
            replica = self._placement.replica_of(ticket)
            if replica is None:
                ended.append(Finished(id, cancel.finish))
                self._take_from_line(ticket, id)
            else:
                by_replica.setdefault(replica, []).append(id)
        for number, ids in by_replica.items():
            self._replicas[number].client.cancel(Cancel(tuple(ids), cancel.finish))
        if ended:
            self._news.put(Outputs(finished=tuple(ended)))
            self._place()

    def outputs(self) -> AsyncIterator[EngineNews]:
        return aiter(self._news)

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(it.client.close() for it in self._replicas.values()))
        for task in self._tasks:
            task.cancel()
        self._news.end()

    # to people

    def all(self) -> list[Replica]:
        """The replicas, by number."""
        for number, it in self._replicas.items():
            it.num_taken = self._placement.num_taken(number)
        return list(self._replicas.values())

    def resize(self, fewest: int, most: int, within_s: float) -> None:
        """Sets the smallest and largest number of engines.

        Of those that are too many, one after the other takes no more requests, and leaves once
        its streams have ended; those that have not after `within_s` go on at another engine.
        """
        self._fewest, self._most, self._leave_s = max(1, fewest), most, within_s

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
            self._placement.drain(number)
            self._note_empty()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await old.emptied.wait()
        self._moved.add(number)
        self._lose(old, EngineDown("engine_replaced", _MOVED, given_up=False, from_outside=True))
        self._replicas.pop(number, None)
        await old.client.close()
        if len(self._replicas) < self._fewest and not self._is_closing:
            self._add()

    # what engines say

    def _add(self) -> Replica:
        made = Replica(next(self._numbers), self._start())
        self._replicas[made.number] = made
        self._spawn(self._hear(made))
        return made

    async def _hear(self, replica: Replica) -> None:
        async for news in replica.client.outputs():
            if self._is_closing or replica.number in self._moved:
                continue
            if isinstance(news, Outputs):
                self._news.put(news)
                self._release(news.finished)
            elif isinstance(news, Status):
                self._show(replica, news)
            elif isinstance(news, Loading) and not self._has_engine:
                self._news.put(news)
            elif isinstance(news, EngineUp):
                self._is_up(replica, news)
            elif isinstance(news, EngineDown):
                self._is_down(replica, news)
                if news.given_up:
                    return

    @property
    def _has_engine(self) -> bool:
        return any(it.up for it in self._replicas.values())

    def _is_up(self, replica: Replica, news: EngineUp) -> None:
        was_up = self._has_engine
        replica.came_up(news, asyncio.get_running_loop().time())
        layout = news.ready.layout
        self._placement.open(replica.number, news.ready.max_num_seqs, layout.num_blocks)
        if was_up:
            self._tell_size(has_started=True)
            self._place()
        else:
            self._news.put(msgspec.structs.replace(news, ready=self._ready()))

    def _is_down(self, replica: Replica, news: EngineDown) -> None:
        if news.given_up:
            logger.error("A replica was given up. %s", news.message)
            del self._replicas[replica.number]
            self._again_at = asyncio.get_running_loop().time() + _AGAIN_S
        self._lose(replica, news)

    def _lose(self, replica: Replica, news: EngineDown) -> None:
        """Tells the streams of a lost replica; tells all, if no other engine is up."""
        was_up, replica.up = replica.up, None
        self._retired.count(replica)
        tickets = self._placement.close(replica.number)
        if self._has_engine:
            if was_up:
                lost = self._forget(tickets)
                self._news.put(msgspec.structs.replace(news, given_up=False, lost=lost))
                self._tell_size()
                self._place()
        elif was_up or (news.given_up and not self._replicas):
            self._placement, self._retired = Placement(), Retired()
            self._parts.clear()
            self._tickets.clear()
            self._news.put(msgspec.structs.replace(news, given_up=not self._replicas))

    def _forget(self, tickets: Iterable[Ticket]) -> tuple[SequenceId, ...]:
        """All sequences of the streams that had these: a stream submits them again together."""
        streams = {self._parts[ticket].stream_id for ticket in tickets}
        mine = [ticket for ticket, it in self._parts.items() if it.stream_id in streams]
        lost: list[SequenceId] = []
        for ticket in mine:
            ids = tuple(new.sequence_id for new in self._parts[ticket].sequences)
            lost += ids
            elsewhere = self._placement.replica_of(ticket)
            if elsewhere is not None:  # its place is free once that engine has let go
                self._replicas[elsewhere].client.cancel(Cancel(ids))
                continue
            self._placement.leave(ticket)
            del self._parts[ticket]
            for id in ids:
                del self._tickets[id]
        return tuple(lost)

    # the line

    def _want(self, part: Submit) -> Want:
        prompt, layout = part.prompts[0], self._ready().layout
        num_tokens = max((len(new.generated) for new in part.sequences), default=0) + len(prompt)
        names: tuple[int, ...] = ()
        if part.use_prefix and layout.num_blocks:
            names = prefix_names(prompt, layout.block_size, part.salt)
        due = part.arrival + PRIORITY_LEVEL_S * part.priority
        return Want(len(part.sequences), layout.blocks_for(num_tokens // 4), names, due)

    def _place(self) -> None:
        for placed in iter(self._placement.next, None):
            self._replicas[placed.replica].client.submit(self._parts[placed.ticket])

    def _take_from_line(self, ticket: Ticket, id: SequenceId) -> None:
        del self._tickets[id]
        part = self._parts[ticket]
        left = tuple(new for new in part.sequences if new.sequence_id != id)
        self._placement.leave(ticket)
        if left:
            self._parts[ticket] = msgspec.structs.replace(part, sequences=left)
            self._placement.ask(ticket, self._want(self._parts[ticket]))
        else:
            del self._parts[ticket]

    def _release(self, finished: Iterable[Finished]) -> None:
        for end in finished:
            ticket = self._tickets.pop(end.sequence_id, None)
            if ticket is None:
                continue
            self._placement.release(ticket)
            part = self._parts[ticket]
            left = tuple(new for new in part.sequences if new.sequence_id != end.sequence_id)
            if left:
                self._parts[ticket] = msgspec.structs.replace(part, sequences=left)
            else:
                del self._parts[ticket]
        if finished:
            self._place()
            self._note_empty()

    def _note_empty(self) -> None:
        for it in self.all():
            if it.num_taken:
                it.emptied.clear()
            else:
                it.emptied.set()

    # all of them as one

    def _ready(self) -> Ready:
        return ready_of(it.up.ready for it in self._replicas.values() if it.up)

    def _tell_size(self, has_started: bool = False) -> None:
        first = next(it.up for it in self._replicas.values() if it.up)
        self._news.put(EngineResized(self._ready(), first.pid, has_started))

    def _show(self, replica: Replica, status: Status) -> None:
        replica.status = status
        self._placement.set_free_blocks(replica.number, status.blocks_free)
        known = [it.status for it in self._replicas.values() if it.status]
        line = [self._parts[ticket] for ticket in self._placement.waiting()]
        whole = status_of(known, self._retired, line)
        self._news.put(msgspec.structs.replace(whole, steps=status.steps))

    # how many there are

    async def _scale(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            await self._adjust(clock())

    async def _adjust(self, now: float) -> None:
        if self._is_closing:
            return
        are_up = all(it.up for it in self._replicas.values())
        if not (self._placement.waiting() and are_up):
            self._wanted_since = None
        elif self._wanted_since is None:
            self._wanted_since = now
        too_few = len(self._replicas) < self._fewest and now >= self._again_at
        is_busy = self._wanted_since is not None and now >= self._wanted_since + _GROW_AFTER_S
        if too_few or (is_busy and len(self._replicas) < self._most and now >= self._again_at):
            self._wanted_since = None
            self._add()
            return
        self._shrink()
        for it in self.all():
            if it.num_taken:
                it.rested_at = now
        num_up = sum(it.up is not None for it in self.all())
        if self._idle_s is None or num_up <= self._fewest:
            return
        for it in reversed(self.all()):
            if it.up and not it.num_taken and now >= it.rested_at + self._idle_s:
                await self.replace(it.number, 0)
                return

    def _shrink(self) -> None:
        """One at a time: first of those that are not up, else what has the least to do."""
        if self._leaving or len(self._replicas) <= self._most or not self._has_engine:
            return
        every = self.all()
        least = min(reversed(every), key=lambda it: (it.up is not None, it.num_taken))
        self._leaving.add(least.number)
        self._spawn(self._leave(least.number))

    async def _leave(self, number: int) -> None:
        await self.replace(number, self._leave_s)
        self._leaving.discard(number)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="replicas")
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._news.end(task.exception())


def between(config: ModelConfig) -> tuple[int, int]:
    """The fewest and the most engines that a model shall have."""
    fewest = config.replicas if config.min_replicas is None else config.min_replicas
    return fewest, config.replicas


def _by_prompt(submit: Submit) -> Iterator[Submit]:
    if len(submit.prompts) == 1:
        yield submit
        return
    for number, prompt in enumerate(submit.prompts):
        mine = tuple(
            msgspec.structs.replace(new, prompt=0)
            for new in submit.sequences
            if new.prompt == number
        )
        inputs = submit.inputs[number : number + 1]
        if mine:
            yield msgspec.structs.replace(submit, prompts=(prompt,), inputs=inputs, sequences=mine)
