"""Counts the calls of Headrace's own functions in a server's process, for `tools.paths`.

Python imports a module of this name when Python starts, so the server needs no code for the
counter. A thread answers on a Unix socket named after the process: `begin` clears all counts,
`end` returns them.
"""

import dis
import json
import os
import socket
import sys
import threading
from types import CodeType, FrameType
from typing import Any

FOLDER, SOURCES = os.environ.get("HEADRACE_PATHS", ""), os.environ.get("HEADRACE_SOURCES", "")


def role() -> str:
    """Return the role of this process in a server; empty for workers and other programs."""
    if "headrace_engine.process" in sys.orig_argv:
        return "engine"
    return "gateway" if "headrace" in sys.orig_argv and "serve" in sys.orig_argv else ""


class Calls:
    """The calls of a function by one caller, and the calls that the function made."""

    __slots__ = ("called", "code", "resumed", "started")

    def __init__(self, code: CodeType | None) -> None:
        self.code = code
        self.started = self.resumed = 0
        self.called: dict[int, Calls] = {}

    def rows(self, depth: int = 0) -> list[tuple[int, str, int, str, int, int]]:
        """Return a row per function below, callers first: depth, file, line, name, two counts."""
        rows = []
        for calls in list(self.called.values()):
            code = calls.code
            assert code is not None
            file = code.co_filename.removeprefix(SOURCES).lstrip("/")
            counts = calls.started, calls.resumed
            rows += [(depth, file, code.co_firstlineno, code.co_qualname, *counts)]
            rows += calls.rows(depth + 1)
        return rows


class Counter:
    """Counts while `root` is set. A stack has only frames of Headrace's own functions."""

    def __init__(self) -> None:
        self.root: Calls | None = None
        self._threads = threading.local()
        # Maps the id of a code object to the offset of its start, or to -1 for code of libraries.
        self._starts: dict[int, int] = {}
        # Keeps the code objects alive, so that the ids are not reused.
        self._codes: list[CodeType] = []

    def on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        root = self.root
        if root is None or event not in ("call", "return"):
            return
        threads, code = self._threads, frame.f_code
        start = self._starts.get(id(code))
        if start is None:
            start = self._note(code)
        if start < 0:
            return
        if getattr(threads, "root", None) is not root:
            threads.root, threads.stack = root, []
        stack = threads.stack
        if event == "call":
            caller = stack[-1][1] if stack else root
            calls = caller.called.get(id(code))
            if calls is None:
                calls = caller.called[id(code)] = Calls(code)
            # A coroutine or generator is also entered when it continues after a yield.
            calls.started += frame.f_lasti == start
            calls.resumed += frame.f_lasti != start
            stack.append((id(frame), calls))
        elif stack and stack[-1][0] == id(frame):
            stack.pop()

    def _note(self, code: CodeType) -> int:
        self._codes.append(code)
        start = -1
        if code.co_filename.startswith(SOURCES):
            found = (it.offset for it in dis.get_instructions(code) if it.opname == "RESUME")
            start = next(found, 0)
        self._starts[id(code)] = start
        return start


def serve(counter: Counter, listener: socket.socket) -> None:
    while True:
        with listener.accept()[0] as connection:
            if connection.recv(16) == b"begin":
                counter.root = Calls(None)
            else:
                root, counter.root = counter.root, None
                connection.sendall(json.dumps(root.rows() if root else []).encode())


if FOLDER and (name := role()):
    counter, listener = Counter(), socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(FOLDER, name))
    listener.listen()
    threading.Thread(target=serve, args=(counter, listener), name="paths", daemon=True).start()
    threading.setprofile(counter.on_event)
    sys.setprofile(counter.on_event)
