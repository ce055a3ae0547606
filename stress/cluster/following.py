"""Reads one stream to its end through a load balancer, and resumes it by byte after each break."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tools.harness.sse import data_in

_END = b"data: [DONE]\n\n"
_ROUTE = "/v1/chat/completions"
_SILENCE_S = 30.0


def question(prompt: str, num_tokens: int) -> dict[str, Any]:
    """Return a chat request whose answer is always the same."""
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": num_tokens, "temperature": 0}


class StreamReader:
    """A client that reads a stream of one conversation. `body` is what has arrived so far.

    `on_break` is called with the reason each time a connection ends before the stream.
    """

    def __init__(
        self, url: str, conversation: str, on_break: Callable[[str], None] = lambda why: None
    ) -> None:
        self.body = b""
        self.stream_id = ""
        # The longest time between two pieces of text, heartbeats left out.
        self.longest_silence_s = 0.0
        self.num_breaks = 0
        self._url = url
        self._conversation = conversation
        self._on_break = on_break
        self._text_at = time.monotonic()

    @property
    def text(self) -> str:
        """The text in the complete frames that have arrived."""
        whole = self.body[: self.body.rfind(b"\n\n") + 2]
        return "".join(
            choice["delta"].get("content") or ""
            for frame in data_in(whole)
            for choice in frame.get("choices", ())
        )

    def read(self, asked: dict[str, Any], within_s: float = 120.0) -> Iterator[str]:
        """Send the request and yield the text so far after each piece, until the stream ends.

        Raises TimeoutError if the stream has not ended in time.
        """
        deadline = time.monotonic() + within_s
        headers = {"X-Conversation-Id": self._conversation}
        body = asked | {"stream": True}
        while not self.body.endswith(_END):
            if time.monotonic() > deadline:
                raise TimeoutError(f"The stream has not ended in {within_s:g} s.")
            if self.stream_id:
                params: dict[str, str | int] = {
                    "conv_id": self._conversation,
                    "from": len(self.body),
                }
                call = ("GET", f"{self._url}/v1/stream", {"params": params})
            else:
                call = ("POST", f"{self._url}{_ROUTE}", {"json": body, "headers": headers})
            yield from self._pieces(*call)
            if not self.body.endswith(_END):
                self.num_breaks += 1
                time.sleep(0.2)

    def _pieces(self, method: str, url: str, options: dict[str, Any]) -> Iterator[str]:
        why = "the connection ended"
        try:
            with httpx.stream(method, url, timeout=_SILENCE_S, **options) as answer:
                if answer.status_code != 200:
                    why = f"status {answer.status_code}"
                    return
                self.stream_id = answer.headers.get("x-stream-id", self.stream_id)
                for piece in answer.iter_raw():
                    before = self.text
                    self._add(piece)
                    if (text := self.text) != before:
                        self._note_text()
                        yield text
        except httpx.TransportError as error:
            why = type(error).__name__
        finally:
            if not self.body.endswith(_END):
                self._on_break(why)

    def _add(self, piece: bytes) -> None:
        self.body += piece

    def _note_text(self) -> None:
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self._text_at)
        self._text_at = now
