"""Concurrent streams on a server with several engines, and the state of its replicas."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tools.harness.eventually import eventually

ASKED = {"temperature": 0, "ignore_eos": True, "stream": True, "return_progress": True}
LIMIT_S = 240


def up(url: str) -> list[dict[str, Any]]:
    """Return the replicas that are up."""
    state = httpx.get(f"{url}/manage/state", timeout=LIMIT_S).json()
    return [it for it in state["replicas"] if it["state"] == "up"]


class Following:
    """A stream as its client sees it."""

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        self._url = url
        self._body = {**ASKED, "prompt": prompt, "max_tokens": max_tokens}
        self.text, self.num_gaps, self.is_done = "", 0, False
        self.longest_silence_s = 0.0  # between two pieces of text
        self._last = 0.0

    def follow(self) -> "Following":
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=LIMIT_S) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                self._take(line)
        assert self.is_done
        return self

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            frame = json.loads(line.removeprefix("data: "))
            assert "error" not in frame, frame
            if piece := "".join(choice["text"] for choice in frame.get("choices", ())):
                self._hear(piece)
            self.num_gaps += "recovering" in frame

    def _hear(self, piece: str) -> None:
        now = time.monotonic()
        if self.text:
            self.longest_silence_s = max(self.longest_silence_s, now - self._last)
        self.text, self._last = self.text + piece, now


def at_once(url: str, number: int, max_tokens: int, act: Callable[[], None]) -> list[Following]:
    """Follow concurrent streams; call `act` once each of them has received text."""
    streams = [Following(url, f"stream {n % 4}", max_tokens) for n in range(number)]
    with ThreadPoolExecutor(number) as pool:
        running = [pool.submit(stream.follow) for stream in streams]
        eventually(lambda: all(it.text for it in streams), LIMIT_S)
        act()
        return [it.result(timeout=LIMIT_S) for it in running]
