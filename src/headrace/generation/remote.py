"""A live stream that another server writes: here it is read, and its writer is asked."""

import contextlib
from collections.abc import Sequence

from headrace.generation.readers import Audience, ReaderPause
from headrace.streams.events import AnyEvent, Heartbeat, Progress, Tokens
from headrace.streams.log import LogGone, LogUnsound
from headrace.streams.store import RemoteWriter, Stored


class RemoteStream:
    """A stream of another server, read like our own. If that server goes, another takes it over."""

    def __init__(self, stored: Stored, writer: RemoteWriter, pause: ReaderPause) -> None:
        self.record = stored.record
        self.log = stored.log
        self.audience = Audience(self.log, pause=pause)
        self._writer = writer

    @property
    def state(self) -> str:
        """queued, prompt, decode or recovering, by what its log said last."""
        return state_of(self._writer.recent())

    def beat(self, form: str, interval_s: float) -> None:
        """Asks for a heartbeat in the log."""
        self._writer.beat(form, interval_s)

    async def stop(self, code: str) -> None:
        """Returns once its log has ended."""
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
