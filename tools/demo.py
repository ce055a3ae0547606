"""Shows the promises on a real server, in a minute once its kernels are compiled: `make demo`."""

import concurrent.futures
import contextlib
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
LONG_COUNT = "Count from 1 to 120."
LONG_PROMPT = "Here is a list of words: " + "river mill water wheel stone grain " * 250


class Server:
    """A server of its own, with its own state, on a free port."""

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


def one_chat(url: str) -> None:
    print("\n1. A chat, streamed:")
    started = time.monotonic()
    with post(url, chat("Hello! Who are you?")) as answer:
        pieces = texts(frames(answer))
        print("   " + next(pieces), end="", flush=True)
        first_ms = (time.monotonic() - started) * 1000
        print("".join(pieces), f"\n   (first text after {first_ms:.0f} ms)")


def never_silent(url: str) -> None:
    print("\n2. Never silent: a long prompt tells how far it is.")
    with post(url, chat(LONG_PROMPT, max_tokens=1, return_progress=True)) as answer:
        seen = [frame["prompt_progress"] for frame in frames(answer) if "prompt_progress" in frame]
    shown = ", ".join(f"{p['processed']}/{p['total']}" for p in seen)
    print(f"   prompt tokens: {shown}")
    assert seen[-1]["processed"] == seen[-1]["total"]


def never_stalled(url: str) -> None:
    print("\n3. Never stalled: eight chats at once, and a long prompt beside them.")
    alone = ask(url, COUNT)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        chats = [pool.submit(ask, url, COUNT) for _ in range(8)]
        long = pool.submit(ask, url, "Again. " + LONG_PROMPT, max_tokens=5)
        same = sum(future.result() == alone for future in chats)
        long.result()
    print(
        f"   {same} of 8 gave exactly the text of the chat alone; the long prompt was served too."
    )
    assert same == 8


def a_client_that_leaves(url: str) -> None:
    print("\n4. A client that leaves in mid-answer frees its place.")
    with post(url, chat("Count from 1 to 200.")) as answer:
        pieces = texts(frames(answer))
        text = "".join(next(pieces) for _ in range(10))
    started = time.monotonic()
    ask(url, "Hello!", max_tokens=4)
    waited_ms = (time.monotonic() - started) * 1000
    print(f"   It read {text!r} and left; the next chat was answered in {waited_ms:.0f} ms.")


def never_lost_on_a_cut(url: str) -> None:
    print("\n5. Never lost: the line is cut, the stream goes on, the rest comes from its byte.")
    undisturbed = ask(url, LONG_COUNT)
    got = b""
    with post(url, chat(LONG_COUNT), **{"X-Conversation-Id": "demo"}) as answer:
        for piece in answer.iter_raw():
            got += piece
            if len(got) > 8_000:
                break
    place: dict[str, str | int] = {"conv_id": "demo", "from": len(got)}
    rest = httpx.get(f"{url}/v1/stream", params=place, timeout=60).content
    lines = (got + rest).decode().splitlines()
    found = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
    same = "".join(texts(found)) == undisturbed
    print(f"   cut after {len(got)} bytes, {len(rest)} more came; same text as undisturbed: {same}")
    assert same


def never_lost_on_a_kill(server: Server) -> None:
    print("\n6. Never lost: the engine is killed in mid-answer, the same connection goes on.")
    undisturbed = ask(server.url, LONG_COUNT)
    with post(server.url, chat(LONG_COUNT)) as answer:
        pieces = texts(frames(answer))
        text = "".join(next(pieces) for _ in range(20))
        os.kill(server.engine_pid(), signal.SIGKILL)
        last, waited_s = time.monotonic(), 0.0
        for piece in pieces:  # the first of them may have been on their way
            text += piece
            waited_s, last = max(waited_s, time.monotonic() - last), time.monotonic()
    same = text == undisturbed
    print(f"   text again after {waited_s:.1f} s; same text as undisturbed: {same}")
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
