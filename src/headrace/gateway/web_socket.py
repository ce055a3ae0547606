"""Limits the memory and the time of the event loop that one client of a WebSocket can use.

uvicorn and the package websockets only limit the size of a message.
"""

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from headrace.gateway.realtime import GOING_AWAY
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.system.awake import Countdown

# Seconds between pings on a WebSocket, and seconds to wait for a pong.
PING_S, PONG_S = 15.0, 45.0
# Number of bytes to parse at a time. The smallest frame has 6 bytes and takes about 10 µs.
_STEP_BYTES = 2 << 10
# Shorter fragments of a message are joined, and shorter messages are not counted.
_SMALL = 64 << 10
# The limit for unread messages, as a multiple of the maximum size of a message.
_NUM_LARGEST = 4
_TRY_AGAIN_LATER = 1013


class UnreadMessages:
    """Limits the memory for messages that the application has not received yet, on all sockets.

    Beyond the limit, the connection that has had a large message for the longest time is cut.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._most = _NUM_LARGEST * max_message_bytes
        # The bytes of each socket with a large unread message, oldest first.
        self._sizes: dict[SocketProtocol, int] = {}

    def count(self, socket: "SocketProtocol", num_bytes: int) -> None:
        """Set the number of unread bytes of a socket; cut connections if there are too many."""
        if num_bytes <= _SMALL:
            self._sizes.pop(socket, None)
            return
        self._sizes[socket] = num_bytes
        over = sum(self._sizes.values()) - self._most
        while over > 0:
            oldest = next(iter(self._sizes))
            over -= self._sizes.pop(oldest)
            oldest.cut()


class SocketProtocol(WebSocketsSansIOProtocol):
    """Reads and writes one WebSocket; drops a client that answers no pings.

    Frames are parsed in slices of the event loop, since a read can contain thousands of frames. At
    shutdown, the application closes the socket.
    """

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._unread: UnreadMessages = server_state.unread_messages  # type: ignore[attr-defined]
        # The bytes of the complete messages in uvicorn's queue.
        self._num_queued = 0
        self._unparsed = bytearray()
        # The task that parses the rest of a read. Nothing else is read meanwhile.
        self._parsing: asyncio.Task[None] | None = None
        # The answer to the latest ping of a client that does not read.
        self._late_pong = b""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed.clear()
        self._unread.count(self, 0)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self._parsing is None:
            self._parse_step()
            if self._unparsed:
                self.transport.pause_reading()
                self._parsing = self.loop.create_task(self._parse_rest())

    def _parse_step(self) -> None:
        step = bytes(self._unparsed[:_STEP_BYTES])
        del self._unparsed[:_STEP_BYTES]
        super().data_received(step)
        self._count()

    async def _parse_rest(self) -> None:
        await slice_of_loop()
        while self._unparsed:
            self._parse_step()
            await slice_of_loop()
        self._parsing = None
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _count(self) -> None:
        """Count the queued messages, the fragments of a message and the bytes of a frame."""
        is_open = not self.transport.is_closing()
        num_parts = sum(map(len, self.frames)) + len(self.conn.reader.buffer)
        self._unread.count(self, self._num_queued + num_parts if is_open else 0)

    def cut(self) -> None:
        """Close the connection, so that its unread messages can be freed."""
        self.conn.fail(_TRY_AGAIN_LATER, "too many large messages")
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        """Add a fragment to its message. A client can send any number of empty fragments."""
        parts: list[Any] = self.frames
        last = parts[-1]
        if isinstance(last, bytearray) and len(last) < _SMALL:
            last += event.data
        elif event.data:
            parts.append(bytearray(event.data))
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        # After the close, uvicorn discards all messages.
        if not self.close_sent:
            self._num_queued += sum(map(len, self.frames))
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        message = await super().receive()
        if self._parsing is not None and not self.transport.is_closing():
            # uvicorn has resumed reading, because its queue is empty.
            self.transport.pause_reading()
        if self.queue.empty():
            self._num_queued = 0
            self._count()
        return message

    def handle_ping(self) -> None:
        """Answer a ping. A client that does not read gets only the latest answer, later."""
        pongs = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pongs)
        elif pongs:
            self._late_pong = pongs

    def resume_writing(self) -> None:
        super().resume_writing()
        pong, self._late_pong = self._late_pong, b""
        if pong:
            self.transport.write(pong)

    def send_keepalive_ping(self) -> None:
        super().send_keepalive_ping()
        if self.pong_timer is not None:
            self.pong_timer.cancel()
            self.pong_timer = Countdown(PONG_S, self.keepalive_timeout)  # type: ignore[assignment]

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    def shutdown(self) -> None:
        if self.handshake_complete and not (self.close_sent or self.disconnected):
            # The streams on this socket still send their last events. Then the application closes
            # the socket.
            self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
        else:
            super().shutdown()
