"""The simulated system: an event loop with virtual time, threads without parallelism, processes.

detangle's loop owns the clock and the order of all callbacks. This module adds what the server
needs beyond that. Threads are greenlets: a thread runs until it blocks, and the loop then chooses
what runs next. After the end of a process, nothing that belongs to it runs again, not even a
`finally` block.
"""

import asyncio
import contextlib
import itertools
import queue
import random
import secrets
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

import greenlet
from detangle import SimConfig, SimLoop
from detangle._loop import Lane
from detangle.strategies import Strategy

from headrace.workers import loop_slices

T = TypeVar("T")

PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)
"""The process to which the running code belongs; None for the world outside the server."""

AGAIN_S = 0.001
"""The time between two attempts of anyio to cancel a task."""

_numbers = itertools.count(1)


class Process:
    """A process. All tasks, callbacks, timers and threads that it started end with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.parent = PROCESS.get()
        # Callbacks that became due during a pause, in order; None unless the process is paused.
        self._held: list[tuple[Lane, asyncio.Handle]] | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether this process or the process that started it has ended."""
        return self.is_dead or (self.parent is not None and self.parent.has_ended)

    @property
    def is_paused(self) -> bool:
        return self._held is not None

    def kill(self) -> None:
        self.is_dead = True

    def pause(self) -> None:
        """Run nothing of this process until `unpause`; processes that it started go on."""
        self._held = self._held or []

    def hold(self, lane: Lane, handle: asyncio.Handle) -> bool:
        """Keep a callback for later if the process is paused; return whether it was kept."""
        if self._held is None:
            return False
        self._held.append((lane, handle))
        return True

    def unpause(self) -> None:
        held, self._held = self._held or [], None
        for lane, handle in held:
            world_loop()._enqueue_lane(lane, handle)


class _Task(asyncio.Task[Any]):
    """A task whose hash is a number, so that sets of tasks have the same order in every run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_numbers)
        context = options.get("context")
        self.process: Process | None = PROCESS.get() if context is None else context.get(PROCESS)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    """A future whose hash is a number, like a task's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class WorldLoop(SimLoop):
    """The event loop of a whole run: of all processes, and of everything around them."""

    def __init__(self, config: SimConfig, strategy: Strategy, *, tracer: Any = None) -> None:
        super().__init__(config, strategy, tracer=tracer)
        self.set_task_factory(lambda loop, coro, **options: _Task(coro, loop=loop, **options))
        self._executors: dict[tuple[int, Process | None], _Executor] = {}
        # Calls that are due after a number of steps, the earliest first.
        self._due: list[tuple[int, Callable[[], None]]] = []
        # Returns the seconds for which a job of a thread pool waits before it begins.
        self.job_delay_s: Callable[[], float] = lambda: 0.0

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        # anyio calls this method again and again until the tasks that it cancels have ended. With
        # the priorities of this loop, these tasks would never get their turn.
        if getattr(callback, "__name__", "") == "_deliver_cancellation":
            return self.call_later(AGAIN_S, callback, *args, context=context)
        return super().call_soon(callback, *args, context=context)

    def _execute(self, lane: Lane, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None or not (process.has_ended or process.hold(lane, handle)):
            super()._execute(lane, handle)
        while self._due and self.steps >= self._due[0][0]:
            self._due.pop(0)[1]()

    def after_steps(self, number: int, call: Callable[[], None]) -> None:
        """Call `call` between two steps, after `number` more steps.

        Steps are many where much happens, so this hits windows that are too short for a timer.
        """
        insort(self._due, (self.steps + number, call), key=lambda due: due[0])

    def resume(self, thread: "Thread") -> None:
        """Make a thread ready; the loop chooses when it runs."""
        handle = asyncio.Handle(thread.switch, (), self, thread.context)
        self._enqueue_lane(thread.lane, handle)

    def living_tasks(self, process: Process) -> "list[asyncio.Task[Any]]":
        """Return the tasks of a process that are not done."""
        return [
            it for it in self.tasks if not it.done() and getattr(it, "process", None) is process
        ]

    def new_lane(self, name: str) -> Lane:
        return Lane(self._new_lane_id(), None, "thread", name)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self.create_future()
        # Each process has its own threads, also for a pool that a module makes.
        key = (id(executor), PROCESS.get())
        pool = self._executors.get(key)
        if pool is None:
            most = getattr(executor, "_max_workers", 32)
            # The executor is kept, so that its id is not used again.
            pool = self._executors[key] = _Executor(executor, most)
        pool.add(lambda: func(*args), future, self.job_delay_s)
        return future


class _Executor:
    """Runs the jobs of a thread pool in order, at most `most` at a time."""

    def __init__(self, executor: Any, most: int) -> None:
        self._executor, self._most = executor, most
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_running = 0

    def add(
        self, work: Callable[[], T], future: "asyncio.Future[T]", delay_s: Callable[[], float]
    ) -> None:
        def run() -> None:
            if not future.cancelled():
                if seconds := delay_s():
                    time.sleep(seconds)
                _settle(future, work)
            self._num_running -= 1
            self._start()

        self._waiting.append(run)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._num_running < self._most:
            self._num_running += 1
            Thread(target=self._waiting.popleft(), name="job").start()


def _settle(future: "asyncio.Future[T]", work: Callable[[], T]) -> None:
    try:
        result = work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)


def world_loop() -> WorldLoop:
    """Return the loop of this run."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorldLoop)
    return loop


def _current() -> "Thread":
    thread = getattr(greenlet.getcurrent(), "thread", None)
    assert thread is not None, "the event loop itself would block here"
    return thread  # type: ignore[no-any-return]


class Thread:
    """A simulated `threading.Thread`: a greenlet that runs until it blocks."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name or "thread", daemon
        self._work = (target, args, kwargs or {})
        self._has_ended = Event()
        self._waits = 0

    def start(self) -> None:
        loop = world_loop()
        self.context = copy_context()
        self.lane = loop.new_lane(f"thread {self.name}")
        self._greenlet = _Greenlet(self._run)
        self._greenlet.thread = self
        self._greenlet.gr_context = copy_context()
        loop.resume(self)

    def join(self, timeout: float | None = None) -> None:
        self._has_ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._has_ended.is_set()

    def switch(self) -> None:
        """Run the thread until it blocks or ends."""
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.switch()

    def park(self, seconds: float | None, waiters: "list[Waiter] | None" = None) -> bool:
        """Block until a waker or the time limit; return whether a waker came first."""
        self._waits += 1
        number, was_woken, loop = self._waits, [False], world_loop()

        def wake(by_waker: bool) -> None:
            if self._waits == number:
                self._waits += 1
                was_woken[0] = by_waker
                loop.resume(self)

        if waiters is not None:
            waiters.append(lambda: wake(True))
        if seconds is not None:
            loop.call_later(max(0.0, seconds), wake, False, context=self.context)
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()
        return was_woken[0]

    def _run(self) -> None:
        target, args, kwargs = self._work
        try:
            if target is not None:
                target(*args, **kwargs)
        finally:
            self._has_ended.set()


class _Greenlet(greenlet.greenlet):  # type: ignore[misc]
    thread: Thread


Waiter = Callable[[], None]


class Event:
    """A simulated `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set and timeout != 0:
            _current().park(timeout, self._waiters)
        return self._is_set


class SimpleQueue:
    """A simulated `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters: list[Waiter] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = None if ends is None else ends - time.monotonic()
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            _current().park(left, self._waiters)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    __class_getitem__ = classmethod(lambda cls, _: cls)


def sleep(seconds: float) -> None:
    """Sleep in virtual time, in place of `time.sleep`."""
    _current().park(seconds)


class _ByProcess(dict[Any, Any]):
    """A dictionary with one entry per process, in place of one entry per event loop."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(PROCESS.get(), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(PROCESS.get(), value)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Replace threads, sleep and randomness of the standard library."""
    replaced: list[tuple[Any, str, Any]] = [
        (threading, "Thread", Thread),
        (threading, "Event", Event),
        (queue, "SimpleQueue", SimpleQueue),
        (time, "sleep", sleep),
        (loop_slices, "_of_loop", _ByProcess()),
        (secrets, "token_hex", lambda num=32: random.randbytes(num or 32).hex()),
        (secrets, "randbits", random.getrandbits),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
