"""Shows on a real server that a stream is never silent, never stalled and never lost.

`make demo` runs the demo, which takes about a minute. The first run takes longer, because the
server has to compile its kernels.
"""

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

COUNT = "Count from 1 to 60."
LONG_COUNT = "Count from 1 to 50."
LONG_PROMPT = "Here is a list of words: " + "river mill water wheel stone grain " * 250


class Server:
    """A running Headrace server that was started for the demo, on a free port."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.url = url
        self._process = process

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return next(
            int(pid)
            for pid in children.read_text().split()
            if b"headrace_engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )


@contextlib.contextmanager
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--state-dir", state]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"ready at (http://[\d.:]+\d)", line):
                    print(line.rstrip())
                    yield Server(process, found[1])
                    break
            else:
                sys.exit("The server did not start.")
        finally:
            process.terminate()
            print(f"\nThe server stopped with exit code {process.wait(timeout=60)}.")


def chat(prompt: str, **fields: object) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
    return body | {"stream": True, "max_tokens": 200} | fields


def frames(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    answer.raise_for_status()
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def texts(frames: Iterator[dict[str, Any]]) -> Iterator[str]:
    for frame in frames:
        for choice in frame["choices"]:
            if text := choice["delta"].get("content"):
                yield text


def post(url: str, body: dict[str, Any], **headers: str) -> Any:
    return httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
    )


def ask(url: str, prompt: str, **fields: object) -> str:
    with post(url, chat(prompt, **fields)) as answer:
        return "".join(texts(frames(answer)))


class Printer:
    """Prints pieces of text as they arrive, in indented lines of about 80 columns."""

    def __init__(self) -> None:
        self._column = 0

    def add(self, piece: str) -> None:
        for part in re.findall(r"\S+|\s+", piece):
            if part.isspace() and self._column > 76:
                print(flush=True)
                self._column = 0
            elif not (part.isspace() and self._column == 0):
                shown = part if self._column else f"   {part}"
                print(shown, end="", flush=True)
                self._column += len(shown)

    def note(self, text: str) -> None:
        """Print a remark between square brackets, on a separate line."""
        print(f"\n   [{text}]" if self._column else f"   [{text}]", flush=True)
        self._column = 0


def one_chat(url: str) -> None:
    print("\n1. A chat is streamed to the client:")
    started = time.monotonic()
    with post(url, chat("Hello! Who are you?")) as answer:
        pieces = texts(frames(answer))
        print("   " + next(pieces), end="", flush=True)
        first_ms = (time.monotonic() - started) * 1000
        print("".join(pieces), f"\n   (The first text arrived after {first_ms:.0f} ms.)")


def never_silent(url: str) -> None:
    print("\n2. Never silent: the stream reports progress while a long prompt is being processed.")
    with post(url, chat(LONG_PROMPT, max_tokens=1, return_progress=True)) as answer:
        done = total = 0
        for frame in frames(answer):
            if progress := frame.get("prompt_progress"):
                done, total = progress["processed"], progress["total"]
                bar = "#" * (40 * done // total)
                print(f"\r   [{bar:40}] {done:,} of {total:,} tokens", end="", flush=True)
    print()
    assert done == total > 0


def never_stalled(url: str) -> None:
    print("\n3. Never stalled: eight chats and one long prompt are answered at the same time.")
    alone = ask(url, COUNT)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        chats = [pool.submit(ask, url, COUNT) for _ in range(8)]
        long = pool.submit(ask, url, "Again. " + LONG_PROMPT, max_tokens=5)
        same = sum(future.result() == alone for future in chats)
        long.result()
    print(f"   {same} of the 8 chats gave exactly the same text as one chat on an idle server.")
    print("   The long prompt was answered too.")
    assert same == 8


def a_client_that_leaves(url: str) -> None:
    print("\n4. When a client disconnects, its request stops and the next one can start.")
    with post(url, chat("Count from 1 to 200.")) as answer:
        pieces = texts(frames(answer))
        text = "".join(next(pieces) for _ in range(10))
    started = time.monotonic()
    ask(url, "Hello!", max_tokens=4)
    waited_ms = (time.monotonic() - started) * 1000
    print(f"   The client disconnected after it had read {text!r}.")
    print(f"   The next chat was answered in {waited_ms:.0f} ms.")


def print_comparison(same: bool) -> None:
    print(f"   Is it the same text as without the interruption? {'Yes.' if same else 'No.'}")


def text_of(body: bytes) -> str:
    """Return the text in the complete events of a body. The last event may be incomplete."""
    lines = body.decode(errors="replace").split("\n")[:-1]
    return "".join(texts(json.loads(line[6:]) for line in lines if line.startswith("data: {")))


def never_lost_on_a_cut(url: str) -> None:
    print("\n5. Never lost: the connection breaks, and the client resumes at the next byte.")
    undisturbed = ask(url, LONG_COUNT)
    got = b""
    with post(url, chat(LONG_COUNT), **{"X-Conversation-Id": "demo"}) as answer:
        for piece in answer.iter_raw():
            got += piece
            if len(got) > 8_000:
                break
    cursor: dict[str, str | int] = {"conv_id": "demo", "from": len(got)}
    rest = httpx.get(f"{url}/v1/stream", params=cursor, timeout=60).content
    before, whole = text_of(got), text_of(got + rest)
    same = whole == undisturbed
    printer = Printer()
    printer.add(before)
    printer.note(f"The connection breaks after {len(got):,} bytes; a new one asks for the rest.")
    printer.add(whole[len(before) :])
    print()
    print_comparison(same)
    assert same


def never_lost_on_a_kill(server: Server) -> None:
    print(
        "\n6. Never lost: the engine is killed during an answer, and the same connection goes on."
    )
    undisturbed = ask(server.url, LONG_COUNT)
    with post(server.url, chat(LONG_COUNT)) as answer:
        pieces = texts(frames(answer))
        text, printer = "", Printer()
        for piece in itertools.islice(pieces, 20):
            text += piece
            printer.add(piece)
        os.kill(server.engine_pid(), signal.SIGKILL)
        printer.note("The engine is killed.")
        last, waited_s = time.monotonic(), 0.0
        # The first pieces may have been sent before the kill, so measure the longest gap between
        # two pieces.
        for piece in pieces:
            text += piece
            printer.add(piece)
            waited_s, last = max(waited_s, time.monotonic() - last), time.monotonic()
    same = text == undisturbed
    print(f"\n   The longest pause was {waited_s:.1f} s.")
    print_comparison(same)
    assert same


def main() -> None:
    with server() as running:
        one_chat(running.url)
        never_silent(running.url)
        never_stalled(running.url)
        a_client_that_leaves(running.url)
        never_lost_on_a_cut(running.url)
        never_lost_on_a_kill(running)


if __name__ == "__main__":
    main()
