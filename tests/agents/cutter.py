"""A TCP proxy whose target can change and whose connections can be cut."""

import contextlib
import re
import selectors
import socket
import threading

_LARGE = 8192  # bytes; smaller reads are not an agent's prompt
_GATHER_S = 120.0


class Cutter:
    """A proxy that can cut connections when answers start, and hold requests back."""

    def __init__(self) -> None:
        self.target = 0
        self.num_cut = 0
        self._to_cut = 0
        self._after = re.compile(b"")
        self._gathering: threading.Barrier | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut_next(self, number: int, after: bytes = b"data: ") -> None:
        """Cut this many connections, each once its answer contains what the pattern matches."""
        self.num_cut, self._to_cut, self._after = 0, number, re.compile(after)

    def gather(self, number: int) -> None:
        """Hold the next large requests back until there are `number`, then release all at once."""
        self._gathering = threading.Barrier(number, timeout=_GATHER_S)

    def close(self) -> None:
        self._to_cut = 0
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", self.target))
            with server, selectors.DefaultSelector() as ready:
                ready.register(client, selectors.EVENT_READ, server)
                ready.register(server, selectors.EVENT_READ, client)
                while self._pass_on(ready, server):
                    pass

    def _pass_on(self, ready: selectors.BaseSelector, server: socket.socket) -> bool:
        """Forward available data; return whether the connection stays open."""
        for key, _ in ready.select():
            here, there = key.fileobj, key.data
            assert isinstance(here, socket.socket)
            data = here.recv(_LARGE)
            if not data:
                return False
            if here is not server and self._gathering and len(data) == _LARGE:
                self._gathering.wait()
                self._gathering = None
            there.sendall(data)
            if here is server and self._to_cut and self._after.search(data):
                self._to_cut -= 1
                self.num_cut += 1
                return False
        return True
