"""One client's request and what it lived through; how it asks again is in `clients`."""

import asyncio
import time
from typing import Any

import msgspec

from stress.catalog import Question
from stress.frames import error_in
from stress.http import SILENCE_S, WHOLE_S, Call, Exchange, Reply, exchange
from stress.witness import Proxy
from tools.harness.sse import Frame, frames_of

RETRYABLE = (0, 429, 502, 503, 504)  # 502 and 504 are a balancer's words
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Way(msgspec.Struct, frozen=True):
    """How a client asks. Face: byte, event, whole; names: plain, key, conversation, both."""

    face: str
    names: str
    has_second_reader: bool = False
    more: dict[str, Any] = {}

    @property
    def is_plain(self) -> bool:
        return self.names == "plain"


class Story:
    """One request from its first POST to its end. `outcome` is set when it has ended."""

    def __init__(self, label: str, question: Question, way: Way, patience_s: float) -> None:
        self.label = label
        self.question = question
        self.way = way
        self.outcome = ""  # finished, cut, or what went wrong
        self.stream_id: str | None = None  # the one that is followed
        self.has_stream = asyncio.Event()
        self.body = bytearray()  # by byte, or of a whole answer
        self.frames: list[Frame] = []  # by event
        self.second: list[Frame] = []  # what a second reader got
        self.exchanges: list[Exchange] = []
        self.began = time.monotonic()
        self._deadline = self.began + patience_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_over(self) -> bool:
        if not self.outcome and time.monotonic() > self._deadline:
            self.outcome = "never ended"
        return bool(self.outcome)

    @property
    def stream_ids(self) -> set[str]:
        """Every stream that a server made for it, whether or not the client heard of it."""
        heads = [made.said.stream_id for made in self.exchanges]
        return {head for head in heads if head}

    def post(self) -> Call:
        body = self.question.body | self.way.more | {"stream": self.way.face != "whole"}
        headers = []
        if self.way.names in ("key", "both"):
            headers.append(("Idempotency-Key", self.label))
        if self.way.names in ("conversation", "both"):
            headers.append(("X-Conversation-Id", self.label))
        silence_s = SILENCE_S if body["stream"] or "heartbeat" in body else WHOLE_S
        return Call(
            "POST", self.question.route, msgspec.json.encode(body), tuple(headers), None, silence_s
        )

    async def ask(self, proxy: Proxy, call: Call) -> Exchange:
        """One exchange; pauses after one that brought nothing."""
        made = await exchange(proxy, call, self._follow)
        self.exchanges.append(made)
        self._follow(made.got)
        if made.got.body and made.got.status not in RETRYABLE:
            self._pause_s = _FIRST_PAUSE_S
        else:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return made

    def end_with(self, frames: list[Frame]) -> None:
        """Sets the outcome if these frames, all there are so far, say how it ended."""
        if frames and frames[-1].is_done:
            self.outcome = "finished"
        elif found := error_in(frames[-1:]):
            frame, code = found
            if frame.id is not None or self.way.is_plain:
                self.outcome = f"failed: {code}"

    def end_by_status(self, made: Exchange) -> None:
        """Sets the outcome if the status says that asking again is of no use."""
        status = made.got.status
        if status != 200 and status not in RETRYABLE:
            self.outcome = f"refused: {status} {bytes(made.got.body[:300])!r}"

    def frames_by_byte(self) -> list[Frame]:
        return frames_of(bytes(self.body))

    def lines(self) -> list[tuple[float, str]]:
        asked = [(made.began, f"{self.label} {made.line()}") for made in self.exchanges]
        return [(self.began, f"{self.label} {self.way} {self.question.route}"), *asked]

    def _follow(self, reply: Reply) -> None:
        if reply.status == 200 and reply.stream_id:
            self.stream_id = self.stream_id or reply.stream_id
            self.has_stream.set()
