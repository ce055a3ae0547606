"""A stream whose log has ended: only to be read."""

from contextlib import AbstractAsyncContextManager

from headrace.core.errors import RequestError
from headrace.generation.audience import Audience, Reader
from headrace.generation.reader_pause import ReaderPause
from headrace.streams.log import Log
from headrace.streams.record import Record


class FinishedStream:
    """Reads like a live stream; nothing can stop it any more."""

    state = "finished"

    def __init__(self, record: Record, log: Log) -> None:
        self.record = record
        self.log = log
        self.interruption = ReaderPause()

    def beat(self, form: str, interval_s: float) -> None:
        """Has no effect: nothing follows the end."""

    def stop(self, error: RequestError) -> None:
        """Has no effect: the first terminal outcome wins."""

    def reader(self, after: int = -1) -> AbstractAsyncContextManager[Reader]:
        return Audience(None, on_abandoned=lambda: None).reader(self.log, after)
