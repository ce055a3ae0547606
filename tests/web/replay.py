"""The page from a real server, with answers that were recorded: the engine is idle meanwhile.

Requests are recorded in `asked`. Unknown paths are forwarded to the real server.
"""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BURST, PAUSE_S = 200, 0.03  # some thousands of tokens a second


class Replay:
    def __init__(self, real_url: str, pieces: list[Any], *modalities: str) -> None:
        """`pieces`: the deltas of each answer; `modalities`: what its models take.

        A piece is a text, or a delta with other fields.
        """
        self.asked: list[dict[str, Any]] = []
        self.pieces = pieces
        self.pause_s = PAUSE_S
        self.models = ["replayed"]
        self.modalities = modalities or ("text",)
        self.real_url = real_url
        replay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    about = {"input_modalities": replay.modalities}
                    entry = {"object": "model", "architecture": about}
                    entries = [{"id": name, **entry} for name in replay.models]
                    body = json.dumps({"object": "list", "data": entries}).encode()
                    return self._answer({"Content-Type": "application/json"}, body)
                headers = {"Accept": self.headers.get("Accept", "*/*")}
                asked = urllib.request.Request(replay.real_url + self.path, headers=headers)
                with urllib.request.urlopen(asked) as found:
                    kept = ("Content-Type", "Content-Security-Policy")
                    names = {name: found.headers[name] for name in kept}
                    self._answer(names, found.read())

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                replay.asked.append(json.loads(self.rfile.read(size)))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("X-Stream-Id", f"replayed-{len(replay.asked)}")
                self.send_header("Connection", "close")
                self.end_headers()
                for number, frame in enumerate(replay.frames()):
                    self.wfile.write(frame)
                    if number % BURST == BURST - 1:
                        time.sleep(replay.pause_s)
                self.close_connection = True

            def _answer(self, names: dict[str, str], body: bytes) -> None:
                self.send_response(200)
                for name, value in names.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def frames(self) -> Iterator[bytes]:
        for number, piece in enumerate(self.pieces, 1):
            timings = {"predicted_n": number, "predicted_per_second": 100.0}
            timings |= {"predicted_ms": 1000.0 * number}
            delta = {"content": piece} if isinstance(piece, str) else piece
            chunk = {"choices": [{"index": 0, "delta": delta}], "timings": timings}
            yield f"id: r:{number}\ndata: {json.dumps(chunk)}\n\n".encode()
        yield f"id: r:{len(self.pieces) + 1}\ndata: [DONE]\n\n".encode()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
