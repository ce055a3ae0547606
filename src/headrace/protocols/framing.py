"""The ways in which a stream's frames lie on the wire: a dialect names one of them."""

from typing import Protocol


class Framing(Protocol):
    MEDIA_TYPE: str

    def comment(self, words: str) -> bytes:
        """A sign of life that no client takes for data; empty where there is no such thing."""

    def marked(self, frame: bytes, place: str) -> bytes:
        """The frame with its place in its stream, from which a client may read on."""


class ServerSentEvents:
    """A frame is one event and ends in a blank line."""

    MEDIA_TYPE = "text/event-stream"

    def comment(self, words: str) -> bytes:
        """One newline: with a blank line after it, clients parse an empty event."""
        return f": {words}\n".encode()

    def marked(self, frame: bytes, place: str) -> bytes:
        return f"id: {place}\n".encode() + frame


class NewlineJson:
    """A frame is one JSON object on a line of its own; its place is the object's last member."""

    MEDIA_TYPE = "application/x-ndjson"

    def comment(self, words: str) -> bytes:
        """Empty: every line is data, and clients stumble over a blank one."""
        return b""

    def marked(self, frame: bytes, place: str) -> bytes:
        return frame.removesuffix(b"}\n") + f',"id":"{place}"}}\n'.encode()


SSE: Framing = ServerSentEvents()
LINES: Framing = NewlineJson()
