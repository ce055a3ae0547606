"""The engine process: `python -m headrace_engine.process SOCKET STEP_RECORD`; serves one socket.

Engines that share cores get a number and the files of their lock, too.

Two threads run beside the loop. The receiver answers pings and ends the process when the gateway
is gone, for whatever reason. The sender keeps a slow gateway from stopping a step.
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
    """An outbox with its own thread, which writes to the socket."""

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
        """Sends what is left, then ends the thread."""
        self._unsent.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (message := self._unsent.get()) is not None:
            try:
                self._connection.sendall(wire.encode(message))
            except OSError:
                return


class _Progress:
    """Says how far the load has come, in whole percents."""

    def __init__(self, outbox: _Sender) -> None:
        self._outbox = outbox
        self._told: Loading | None = None

    def __call__(self, loading: Loading) -> None:
        rounded = msgspec.structs.replace(loading, share=int(100 * loading.share) / 100)
        if rounded != self._told:
            self._told = rounded
            self._outbox.put(rounded)


def _receive(connection: socket.socket, inbox: Inbox, outbox: _Sender) -> None:
    while (message := wire.receive(connection)) is not None:
        if isinstance(message, Ping):
            outbox.put(Pong(message.number))
        else:
            inbox.put(message)
    os._exit(0)  # the gateway is gone; nobody needs the current step


def _end_with_thread(lost: threading.ExceptHookArgs) -> None:
    threading.__excepthook__(lost)
    os._exit(1)


def main() -> None:
    """Loads what Start names, says Ready or LoadFailed, then runs the loop until Shutdown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.excepthook = _end_with_thread  # an engine that lost a thread cannot hear or speak
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: Inbox = queue.SimpleQueue()
    outbox = _Sender(connection)
    threading.Thread(
        target=_receive, args=(connection, inbox, outbox), name="receiver", daemon=True
    ).start()
    start = inbox.get()
    assert isinstance(start, Start)
    os.nice(start.config.nice)  # this thread and those it starts, not who answers pings
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        from headrace_engine.load import (
            load,  # imports torch, which takes seconds; pings are answered
        )

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


if __name__ == "__main__":
    main()
