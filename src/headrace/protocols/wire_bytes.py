"""The body of a stream's POST, frame by frame and byte by byte, as any later reader gets it."""

from headrace.protocols.frames import PING
from headrace.protocols.render import Frames
from headrace.streams.events import AnyEvent, Heartbeat
from headrace.streams.record import Record


class WireFrames(Frames):
    """Frames with ids where the stream can be found again. Feed it every event from seq 0."""

    def __init__(self, record: Record, with_ids: bool = False) -> None:
        super().__init__(record)
        self._has_ids = with_ids or record.names.is_opted_in
        self._stream_id = record.id

    def render(self, event: AnyEvent) -> list[bytes]:
        if isinstance(event, Heartbeat) and event.form == "comment":
            return [PING]
        frames = super().render(event)
        if not self._has_ids:
            return frames
        return [
            f"id: {self._stream_id}:{event.seq}{_part(k, len(frames))}\n".encode() + frame
            for k, frame in enumerate(frames)
        ]


class ByteWindow:
    """Cuts the first bytes off a body that comes in pieces."""

    def __init__(self, num_skipped: int) -> None:
        self._to_skip = num_skipped
        self.total = 0  # bytes seen so far, skipped ones included

    def cut(self, piece: bytes) -> bytes:
        self.total += len(piece)
        skipped = min(self._to_skip, len(piece))
        self._to_skip -= skipped
        return piece[skipped:]


def _part(k: int, num_frames: int) -> str:
    return f".{k}" if num_frames > 1 else ""
