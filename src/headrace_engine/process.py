"""Runs the engine process: `python -m headrace_engine.process SOCKET STEP_RECORD`.

Both arguments are file descriptors. An engine that shares cores with other engines gets more
arguments: its number, and the file descriptors of the lock.

Two threads run alongside the step loop. The receiver answers pings, and ends the process when the
gateway closes the socket or dies. The sender writes to the socket, so a slow gateway does not block
a step.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading

import msgspec

from headrace_common import wire
from headrace_common.errors import ModelError
from headrace_common.loading import ON_LOADING
from headrace_common.messages import LoadFailed, Loading, Message, Ping, Pong
from headrace_common.system.core_lock import CoreLock
from headrace_common.system.step_record import StepRecord
from headrace_common.wire import Start
from headrace_engine.engine import Inbox


class _Sender:
    """Sends messages in a separate thread, which writes to the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        self._unsent.put(message)

    def num_unsent(self) -> int:
        return self._unsent.qsize()

    def close(self) -> None:
        """Send the remaining messages, then end the thread."""
        self._unsent.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (message := self._unsent.get()) is not None:
            try:
                self._connection.sendall(wire.encode(message))
            except OSError:
                return


class _Progress:
    """Reports the progress of loading, in whole percents."""

    def __init__(self, outbox: _Sender) -> None:
        self._outbox = outbox
        self._last: Loading | None = None

    def __call__(self, loading: Loading) -> None:
        rounded = msgspec.structs.replace(loading, share=int(100 * loading.share) / 100)
        if rounded != self._last:
            self._last = rounded
            self._outbox.put(rounded)


def _receive(connection: socket.socket, inbox: Inbox, outbox: _Sender) -> None:
    while (message := wire.receive(connection)) is not None:
        if isinstance(message, Ping):
            outbox.put(Pong(message.number))
        else:
            inbox.put(message)
    # The gateway is gone, so nobody needs the result of the current step.
    os._exit(0)


def _end_with_thread(lost: threading.ExceptHookArgs) -> None:
    threading.__excepthook__(lost)
    os._exit(1)


def main() -> None:
    """Load the model that the Start message names, then run the step loop until Shutdown.

    Send Ready once the model is loaded. If loading fails, send only LoadFailed.
    """
    # The gateway handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # An engine that has lost a thread can no longer receive or send, so it must end.
    threading.excepthook = _end_with_thread
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: Inbox = queue.SimpleQueue()
    outbox = _Sender(connection)
    threading.Thread(
        target=_receive, args=(connection, inbox, outbox), name="receiver", daemon=True
    ).start()
    start = inbox.get()
    assert isinstance(start, Start)
    # This call lowers the priority of this thread and of all threads that this thread starts later.
    # The receiver's thread already runs and keeps the normal priority.
    os.nice(start.config.nice)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        # Importing torch takes seconds. Meanwhile, the receiver answers pings.
        from headrace_engine.load import load

        ON_LOADING.set(_Progress(outbox))
        loaded = load(start.config)
    except ModelError as error:
        outbox.put(LoadFailed(error.code, str(error)))
    else:
        outbox.put(loaded.ready)
        record = StepRecord(int(sys.argv[2]))
        lock = CoreLock(tuple(map(int, sys.argv[4:])), int(sys.argv[3])) if sys.argv[4:] else None
        loaded.engine(outbox, record, lock).run(inbox)
    outbox.close()
    # A normal exit would first free PyTorch's modules, which takes most of a second.
    os._exit(0)


if __name__ == "__main__":
    main()
