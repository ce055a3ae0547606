"""Runs the step loop between an inbox and an outbox; knows nothing of HTTP."""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headrace_common.ids import SequenceId
from headrace_common.messages import (
    NUM_TRACED_STEPS,
    AdapterRead,
    Cancel,
    DropAdapter,
    Finished,
    FinishReason,
    LoadAdapter,
    Message,
    Outputs,
    Shutdown,
    Status,
    StepTrace,
    Submit,
)
from headrace_common.plan import StepPlan, StepResult
from headrace_common.prefix import DiskNews
from headrace_common.system.awake import STOPPED_S, ProcessStops
from headrace_common.system.core_lock import CoreLock
from headrace_common.system.panics import STEERING
from headrace_common.wire import AnyMessage
from headrace_engine.adapters import AdapterLoader, AdapterReadDone
from headrace_engine.grammars import Compiled, Grammars, failures
from headrace_engine.prefixes.keeper import PrefixKeeper
from headrace_engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_UNSENT = 8
"""No step is launched while more messages than this are unsent."""

_IDLE_POLL_S = 0.02
_STATUS_INTERVAL_S = 0.25
_STARVED_S, _STARVING_INTERVAL_S = 10.0, 300.0


class Launched(Protocol):
    """Represents a plan that is running."""

    def result(self) -> StepResult: ...


class StepRunner(Protocol):
    """Executes steps. Raises MemoryError if a step was too large for the device."""

    def launch(self, plan: StepPlan) -> Launched: ...


class Outbox(Protocol):
    """Sends messages to the gateway; `put` never blocks."""

    def put(self, message: Message) -> None: ...

    def num_unsent(self) -> int: ...


class StepWriter(Protocol):
    """Records the current step, for the supervisor to read if this process dies or hangs."""

    def write(self, sequence_ids: Iterable[SequenceId], predicted_s: float) -> None: ...

    def clear(self) -> None: ...

    def wait(self) -> None: ...


News = AnyMessage | Compiled | AdapterReadDone | DiskNews
Inbox = queue.SimpleQueue[News]
Clock = Callable[[], float]


class NoStepRecord:
    """Records nothing, for an engine that runs in its client's process.

    If that process dies, nobody is left to read a record.
    """

    def write(self, sequence_ids: Iterable[SequenceId], predicted_s: float) -> None: ...

    def clear(self) -> None: ...

    def wait(self) -> None: ...


class StatusReporter:
    """Limits status messages to four per second, except when the engine becomes idle."""

    def __init__(self) -> None:
        self._last: Status | None = None
        self._due = 0.0
        self._unreported_steps: deque[StepTrace] = deque(maxlen=NUM_TRACED_STEPS)

    def note(self, step: StepTrace) -> None:
        self._unreported_steps.append(step)

    def due(self, scheduler: Scheduler, now: float) -> Status | None:
        """Return the status with the steps since the last report.

        Return None if no report is due, or if the status has not changed since the last report.
        """
        if now < self._due and scheduler.has_work:
            return None
        self._due = now + _STATUS_INTERVAL_S
        status = scheduler.status()
        if status == self._last:
            return None
        self._last, steps = status, tuple(self._unreported_steps)
        self._unreported_steps.clear()
        return msgspec.structs.replace(status, steps=steps)


@dataclass
class _Preparing:
    """Counts submits whose grammar or adapter is not ready. Stores cancels in the meantime."""

    num: int = 0
    cancels: list[Cancel] = field(default_factory=list)


class Engine:
    """Repeats the loop: receive messages, plan, launch, wait, commit, send."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        outbox: Outbox,
        step_record: StepWriter | None = None,
        grammars: Grammars | None = None,
        adapters: AdapterLoader | None = None,
        prefixes: PrefixKeeper | None = None,
        core_lock: CoreLock | None = None,
    ) -> None:
        """`core_lock` is shared by engines on the same cores."""
        self._prefixes = prefixes
        self._adapters = adapters or AdapterLoader(None)
        self._core_lock = core_lock
        self._scheduler = scheduler
        self._step_record = step_record or NoStepRecord()
        self._runner = runner
        self._grammars = grammars or Grammars(None)
        self._preparing = _Preparing()
        self._outbox = outbox
        self._clock: Clock = time.monotonic
        self._status = StatusReporter()
        self._starving_due = 0.0
        self._waited_for_gateway = False
        # The time at which the last step ended.
        self._ended_at = self._clock()
        self._stops = ProcessStops()

    def run(self, inbox: Inbox) -> None:
        """Run steps until a Shutdown message; block on the inbox while there is nothing to do.

        Also return after several consecutive sequences failed, each as the only sequence of a
        step. A new engine process may succeed where this process failed.
        """
        if self._prefixes is not None:
            self._prefixes.start(inbox.put)
        try:
            with self._stops:
                while self._receive(inbox) and not self._scheduler.must_exit:
                    if self._must_wait_for_gateway():
                        continue
                    if self._core_lock is not None and self._core_lock.is_shared:
                        self._step_with_core_lock(self._core_lock)
                    else:
                        self.step()
        finally:
            self._step_record.wait()
            if self._prefixes is not None:
                self._prefixes.close()

    def _step_with_core_lock(self, core_lock: CoreLock) -> None:
        """Run a step while no other engine that shares the cores runs a step."""
        scheduler = self._scheduler
        self._step_record.wait()
        with core_lock.held():
            self._step_record.clear()
            scheduler.leave_room(core_lock.others())
            self.step()
            core_lock.note(scheduler.decode_s, scheduler.has_streams, scheduler.has_prompts)

    def step(self) -> bool:
        """Plan, execute and commit one step; return False if there was nothing to do."""
        scheduler = self._scheduler

        # 1. Plan. Starts and cancels are reported before the step executes. Without a step,
        #    the status may be due.
        plan = scheduler.plan(self._clock())
        if self._prefixes is not None:
            self._prefixes.serve(scheduler.take_offers(), scheduler.take_reads())
        outputs = scheduler.take_outputs()
        if plan is None or outputs is not None:
            self._send(outputs)
        if plan is None:
            return False

        # 2. Execute. If this process dies meanwhile, the supervisor reads from the record which
        #    sequences were in the step.
        self._step_record.write(plan.worked_on, plan.allowed_s)
        try:
            result = self._runner.launch(plan).result()
        except MemoryError as error:
            logger.warning("A step of %d chunks ran out of memory: %s", len(plan.chunks), error)
            scheduler.out_of_memory(plan, _NO_MEMORY, self._clock())
        except STEERING:
            raise
        # A panic in a library that is written in Rust is not an Exception.
        except BaseException as error:
            logger.exception("A step of %d chunks failed", len(plan.chunks))
            scheduler.fail(plan, f"{type(error).__name__}: {error}", self._clock())

        # 3. Commit. If the process was suspended since the last step, this step's time says
        #    nothing. A gap shorter than STOPPED_S does not count as a suspension.
        else:
            began_at, self._ended_at = self._ended_at, self._clock()
            if self._ended_at - began_at > STOPPED_S and self._stops.take():
                result = msgspec.structs.replace(result, is_timed=False)
            trace = scheduler.commit(plan, result, self._ended_at)
            if trace is not None:
                self._status.note(trace)

        # 4. Send the tokens, the finished sequences, and a status if one is due.
        self._step_record.clear()
        self._send(scheduler.take_outputs())
        return True

    def _warn_about_starved_prompts(self, now: float) -> None:
        if self._scheduler.starved_s > _STARVED_S and now >= self._starving_due:
            self._starving_due = now + _STARVING_INTERVAL_S
            logger.warning(
                "The running streams alone use up the stall target, so new prompts advance very "
                "slowly. Raise or remove --max-stall-ms."
            )

    def _must_wait_for_gateway(self) -> bool:
        """Return whether the next step has to wait because too many messages are unsent.

        A stall that a slow gateway causes is counted once, no matter how long the stall lasts.
        """
        must_wait = self._outbox.num_unsent() > MAX_UNSENT
        if must_wait and not self._waited_for_gateway and self._scheduler.has_work:
            self._scheduler.count_missed("gateway")
        self._waited_for_gateway = must_wait
        return must_wait

    def _receive(self, inbox: Inbox) -> bool:
        """Handle every waiting message; False after a Shutdown message."""
        timeout = self._scheduler.rest_s(self._clock())
        if self._waited_for_gateway and timeout is not None:
            timeout = max(timeout, _IDLE_POLL_S)
        try:
            while True:
                message = self._next(inbox, timeout)
                if isinstance(message, Shutdown):
                    return False
                self._dispatch(message, inbox)
                timeout = 0
        except queue.Empty:
            return True

    def _next(self, inbox: Inbox, timeout: float | None) -> News | Shutdown:
        """Return the next message, or raise queue.Empty after `timeout` seconds."""
        if timeout == 0:
            return inbox.get(block=False)
        # Waiting may take any time. If anything else takes minutes, the engine counts as hanging.
        self._step_record.wait()
        try:
            return inbox.get(timeout=timeout)
        finally:
            self._step_record.clear()

    def _dispatch(self, message: News, inbox: Inbox) -> None:
        if isinstance(message, Compiled):
            self._compiled(message)
        elif isinstance(message, DiskNews):
            self._scheduler.apply_news(message, self._clock())
        elif isinstance(message, Submit) and (missing := self._adapters.missing(message)):
            self._preparing.num += 1
            self._adapters.read(missing, inbox.put, message)
        elif isinstance(message, Submit) and message.sampling.grammar:
            self._preparing.num += 1
            self._grammars.prepare(message, inbox.put)
        elif isinstance(message, Submit):
            self._scheduler.add(message, self._clock())
        elif isinstance(message, Cancel):
            self._scheduler.cancel(message)
            if self._preparing.num:
                self._preparing.cancels.append(message)
        elif isinstance(message, AdapterReadDone | LoadAdapter | DropAdapter):
            self._dispatch_to_adapters(message, inbox)
        else:
            raise TypeError(f"An engine does not accept the message {type(message).__name__}")

    def _dispatch_to_adapters(
        self, message: AdapterReadDone | LoadAdapter | DropAdapter, inbox: Inbox
    ) -> None:
        if isinstance(message, LoadAdapter):
            self._adapters.read(message.adapter, inbox.put)
        elif isinstance(message, DropAdapter):
            self._adapters.drop(message.fingerprint)
        else:
            answer, waiting = self._adapters.take(message)
            self._outbox.put(answer)
            for submit in waiting:
                self._preparing.num -= 1
                if answer.message:
                    self._outbox.put(Outputs(finished=_ends(submit, answer)))
                else:
                    self._dispatch(submit, inbox)
            self._cancel_again()

    def _compiled(self, compiled: Compiled) -> None:
        self._preparing.num -= 1
        if compiled.error:
            ends = failures(compiled)
            self._grammars.release(end.sequence_id for end in ends)
            self._outbox.put(Outputs(finished=ends))
        else:
            self._scheduler.add(compiled.submit, self._clock())
        self._cancel_again()

    def _cancel_again(self) -> None:
        """Cancel each sequence whose cancel arrived while the sequence was being prepared."""
        for cancel in self._preparing.cancels:
            self._scheduler.cancel(cancel)
        if not self._preparing.num:
            self._preparing.cancels.clear()

    def _send(self, outputs: Outputs | None) -> None:
        """Send the outputs, and a status if one is due."""
        if outputs is not None:
            if outputs.finished:
                self._grammars.release(end.sequence_id for end in outputs.finished)
            self._outbox.put(outputs)
        now = self._clock()
        if (status := self._status.due(self._scheduler, now)) is not None:
            self._outbox.put(status)
            self._warn_about_starved_prompts(now)


def _ends(submit: Submit, answer: AdapterRead) -> tuple[Finished, ...]:
    """Return an error for each sequence of a submit whose adapter cannot be read.

    The message does not show the adapter's path, because clients receive the message.
    """
    message = answer.message if answer.code == "model_changed" else _NO_ADAPTER
    return tuple(
        Finished(it.sequence_id, FinishReason.ERROR, answer.code, message)
        for it in submit.sequences
    )


_NO_ADAPTER = "The request's adapter could not be read; the server's log says why."
_NO_MEMORY = "The device ran out of memory on this request alone; send a shorter request."
