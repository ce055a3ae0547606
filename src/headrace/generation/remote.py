"""Defines a live stream that another server writes.

This server reads the stream's log, and sends stop and heartbeat requests to the writer.
"""

import contextlib
from collections.abc import Sequence

from headrace.generation.readers import Audience, ReaderPause
from headrace.streams.events import AnyEvent, Heartbeat, Progress, Tokens
from headrace.streams.log import LogGone, LogUnsound
from headrace.streams.store import RemoteWriter, Stored


class RemoteStream:
    """A stream of another server, with the interface of a local stream.

    If the other server dies, a running server continues the stream.
    """

    def __init__(self, stored: Stored, writer: RemoteWriter, pause: ReaderPause) -> None:
        self.record = stored.record
        self.log = stored.log
        self.audience = Audience(self.log, pause=pause)
        self._writer = writer

    @property
    def state(self) -> str:
        """Return queued, prompt, decode or recovering, according to the newest event in memory."""
        return state_of(self._writer.recent())

    def beat(self, form: str, interval_s: float) -> None:
        """Ask the writer to append a heartbeat to the log."""
        self._writer.beat(form, interval_s)

    async def stop(self, code: str) -> None:
        """Ask the writer to end the stream; return once the stream's log has ended."""
        await self._writer.stop(code)
        with contextlib.suppress(LogGone, LogUnsound):
            has_ended = False
            while not has_ended:
                next_seq = self.log.next_seq
                _, has_ended = await self.log.read(next_seq - 1, 1)
                if not has_ended:
                    await self.log.wait(next_seq - 1)


def state_of(recent: Sequence[AnyEvent]) -> str:
    for event in reversed(recent):
        if isinstance(event, Tokens):
            return "decode"
        if isinstance(event, Progress):
            return "prompt"
        if isinstance(event, Heartbeat):
            return event.state
    return "queued"
