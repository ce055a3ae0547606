"""Counts the calls of our own functions in a server's process, for `tools.paths`.

Python imports a module of this name when it starts, so the server needs no code for this. A thread
answers on a Unix socket, named as the process: `begin` forgets all counts, `end` returns them.
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
    """Which process of a server this is; empty for a worker and all else."""
    if "headrace_engine.process" in sys.orig_argv:
        return "engine"
    return "gateway" if "headrace" in sys.orig_argv and "serve" in sys.orig_argv else ""


class Calls:
    """The calls of a function by one caller, and what it called in turn."""

    __slots__ = ("called", "code", "resumed", "started")

    def __init__(self, code: CodeType | None) -> None:
        self.code = code
        self.started = self.resumed = 0
        self.called: dict[int, Calls] = {}

    def rows(self, depth: int = 0) -> list[tuple[int, str, int, str, int, int]]:
        """Everything below, callers before what they call: depth, file, line, name and counts."""
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
    """Counts while `root` is set. The stack of a thread only has frames of our own functions."""

    def __init__(self) -> None:
        self.root: Calls | None = None
        self._threads = threading.local()
        self._starts: dict[int, int] = {}  # by the code's id: where it starts, -1 if not ours
        self._codes: list[CodeType] = []  # keeps these ids from being used again

    def hear(self, frame: FrameType, event: str, arg: Any) -> None:
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
            # a coroutine or generator that goes on after a yield is entered as well
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
    threading.setprofile(counter.hear)
    sys.setprofile(counter.hear)
