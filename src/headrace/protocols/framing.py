"""Encodes the frames of a stream for the wire; each dialect chooses a framing."""

from typing import Protocol


class Framing(Protocol):
    MEDIA_TYPE: str

    def comment(self, text: str) -> bytes:
        """Return a heartbeat that clients ignore; empty if the framing has no comments."""

    def marked(self, frame: bytes, cursor: str) -> bytes:
        """Return the frame with its cursor. A client can resume the stream from this cursor."""


class ServerSentEvents:
    """Sends each frame as one event, which ends with a blank line."""

    MEDIA_TYPE = "text/event-stream"

    def comment(self, text: str) -> bytes:
        """Return a comment that ends with one newline; a second newline would end an event."""
        return f": {text}\n".encode()

    def marked(self, frame: bytes, cursor: str) -> bytes:
        return f"id: {cursor}\n".encode() + frame


class NewlineJson:
    """Sends each frame as a JSON object on its own line; the cursor is the object's last member."""

    MEDIA_TYPE = "application/x-ndjson"

    def comment(self, text: str) -> bytes:
        """Return nothing: every line is data, and clients fail on a blank line."""
        return b""

    def marked(self, frame: bytes, cursor: str) -> bytes:
        return frame.removesuffix(b"}\n") + f',"id":"{cursor}"}}\n'.encode()


SSE: Framing = ServerSentEvents()
LINES: Framing = NewlineJson()
