"""One client's request and what happened to it. `clients` decides how the client repeats it."""

import asyncio
import time
from typing import Any

import msgspec

from stress.catalog import Question
from stress.frames import error_in
from stress.http import SILENCE_S, WHOLE_S, Call, Exchange, Reply, exchange
from stress.witness import Proxy
from tools.harness.sse import Frame, frames_of

# A load balancer sends 502 and 504.
RETRYABLE = (0, 429, 502, 503, 504)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Way(msgspec.Struct, frozen=True):
    """How a client sends its request and reads the answer.

    `face` is how the client reads: byte, event or whole (unstreamed). `names` is what the request
    carries: plain (nothing), key, conversation or both.
    """

    face: str
    names: str
    has_second_reader: bool = False
    more: dict[str, Any] = {}

    @property
    def is_plain(self) -> bool:
        return self.names == "plain"


class Story:
    """One client's request, from its first POST to its end. `outcome` is set when it has ended."""

    def __init__(self, label: str, question: Question, way: Way, patience_s: float) -> None:
        self.label = label
        self.question = question
        self.way = way
        # One of: finished, cut, or a description of what went wrong.
        self.outcome = ""
        # The stream that the client reads.
        self.stream_id: str | None = None
        self.has_stream = asyncio.Event()
        # The bytes of a stream that is read by byte, or of an unstreamed answer.
        self.body = bytearray()
        # The frames of a stream that is read by event.
        self.frames: list[Frame] = []
        # The frames that a second reader received.
        self.second: list[Frame] = []
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
        """All streams that a server created for the request, even if the client never knew them."""
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
        """Sends one call, and pauses if no answer arrived."""
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
        """Sets the outcome if the last of these frames shows how the request ended."""
        if frames and frames[-1].is_done:
            self.outcome = "finished"
        elif found := error_in(frames[-1:]):
            frame, code = found
            if frame.id is not None or self.way.is_plain:
                self.outcome = f"failed: {code}"

    def end_by_status(self, made: Exchange) -> None:
        """Sets the outcome if the status shows that another attempt cannot succeed."""
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
