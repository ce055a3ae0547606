import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.gateway.delivery import LiveAnswer, deliver, while_connected
from headrace.protocols.openai.chunks import ChunkBody
from headrace.streams.events import Finish, Heartbeat, Timings, Usage
from headrace.streams.log import MemoryLog
from headrace.streams.record import Names
from headrace.streams.store import StoreStalled
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from tests.gateway.builders import (
    FakeStream,
    accepted,
    ended,
    error,
    make_record,
    make_request,
    progress,
    tokens,
)
from tools.harness.eventually import settle

QUIET = StreamConfig(heartbeat_s=10)
FAST = msgspec.structs.replace(QUIET, heartbeat_s=0.01)
FINISH = Finish(seq=0, at_ms=0, ends=(ended().end,), usage=Usage(2, 1), timings=Timings())
IDLE = b'"delta":{},"finish_reason":null'


class Connection:
    """A fake client of one answer that records its messages and can disconnect."""

    def __init__(self, stream: FakeStream, config: StreamConfig = QUIET) -> None:
        self.messages: list[dict[str, Any]] = []
        self._left = asyncio.Event()
        self._got = asyncio.Condition()
        app = deliver(stream, config)  # type: ignore[arg-type]
        self.task = asyncio.create_task(app({"type": "http"}, self._receive, self._send))

    async def _receive(self) -> dict[str, str]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        async with self._got:
            self.messages.append(message)
            self._got.notify_all()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def until(self, condition: Callable[[bytes], bool]) -> None:
        async with asyncio.timeout(10), self._got:
            await self._got.wait_for(lambda: condition(self.body))

    def stuck(self) -> asyncio.Condition:
        """Return a context in which the socket accepts no data."""
        return self._got

    async def leave(self) -> None:
        self._left.set()
        await asyncio.wait_for(self.task, 10)


async def open_stream(**changes: Any) -> FakeStream:
    stream = FakeStream(make_record(make_request(**changes)))
    await stream.write(accepted(stream.record))
    return stream


STREAMED = {"stream": True}
# With token ids, rendering a token of a missing choice fails.
WITH_IDS = STREAMED | {"return_token_ids": True}


async def test_headers_and_the_first_frame_are_sent_before_the_first_step() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream)
    await client.until(lambda body: body.count(b"\n\n") == 1)
    assert client.messages[0]["status"] == 200
    assert dict(client.messages[0]["headers"]) == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-stream-id": stream.record.id.encode(),
        b"x-stream-mode": b"fresh",
    }
    assert b'"role":"assistant"' in client.body
    await client.leave()


async def test_a_stream_ends_with_done_and_releases_its_reader() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream)
    await stream.write(tokens("Hi", 5), ended(), FINISH)
    await asyncio.wait_for(client.task, 10)
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert client.messages[-1]["more_body"] is False
    assert stream.num_left == 1


async def test_events_written_together_are_sent_in_one_message() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream)
    await client.until(bool)
    await stream.write(tokens("Hi", 5), tokens(" you", 6))
    await client.until(lambda body: b"you" in body)
    assert b"Hi" in client.messages[-1]["body"]
    await client.leave()


async def test_a_client_that_disconnects_stops_being_a_reader() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream)
    await client.until(bool)
    assert stream.num_left == 0
    await client.leave()
    assert stream.num_left == 1


async def test_a_client_cancelled_before_the_first_byte_stops_being_a_reader() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream)
    async with client.stuck():
        await settle()
        client.task.cancel()
        await asyncio.wait((client.task,))
    assert (client.messages, stream.num_left) == ([], 1)


async def test_a_disconnect_is_noticed_while_a_whole_answer_is_generated() -> None:
    stream = await open_stream()
    stream.record = make_record(make_request(response_options={"heartbeat": False}))
    client = Connection(stream)
    await settle()
    await client.leave()
    assert stream.num_left == 1
    assert client.messages == []


async def test_only_written_events_count_as_sent() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream)
    await stream.write(tokens("", 4), tokens("Hi", 5))
    await client.until(lambda body: b"Hi" in body)
    assert [event.seq for event in stream.sent] == [0, 2]
    await client.leave()


async def test_heartbeats_are_sent_while_nothing_is_generated() -> None:
    client = Connection(await open_stream(response_options=STREAMED), FAST)
    await client.until(lambda body: body.count(IDLE) >= 3)
    await client.leave()


async def test_heartbeat_intervals_differ_between_answers() -> None:
    stream = await open_stream(response_options=STREAMED)
    answers = [deliver(stream, QUIET) for _ in range(50)]  # type: ignore[arg-type]
    paces = [answer.pace.heartbeat_s for answer in answers if isinstance(answer, LiveAnswer)]
    assert len(set(paces)) == 50
    assert 8 <= min(paces) <= max(paces) <= QUIET.heartbeat_s


async def test_progress_the_client_does_not_see_does_not_postpone_a_heartbeat() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream, FAST)
    await stream.write(progress(1024))
    await client.until(lambda body: IDLE in body)
    assert b"prompt_progress" not in client.body
    await client.leave()


async def test_heartbeats_of_a_conversation_go_through_the_log() -> None:
    stream = await open_stream(response_options=STREAMED)
    stream.record = msgspec.structs.replace(stream.record, names=Names(conversation="c"))
    client = Connection(stream, FAST)
    await client.until(bool)
    assert await asyncio.wait_for(stream.beats.get(), 10) == "data"
    assert IDLE not in client.body
    await stream.write(Heartbeat(seq=0, at_ms=0, state="prompt", form="data"))
    await client.until(lambda body: IDLE in body)
    await client.leave()


async def test_logged_comments_do_not_postpone_a_heartbeat() -> None:
    stream = await open_stream(response_options=STREAMED)
    stream.record = msgspec.structs.replace(stream.record, names=Names(conversation="c"))
    config = msgspec.structs.replace(QUIET, heartbeat_s=0.05, sse_ping_interval=0.01)
    client = Connection(stream, config)
    async with asyncio.timeout(10):
        while await stream.beats.get() != "data":
            await stream.write(Heartbeat(seq=0, at_ms=0, state="prompt", form="comment"))
    await client.leave()


async def test_a_blocked_reader_requests_no_heartbeat() -> None:
    stream = await open_stream(response_options=STREAMED)
    stream.record = msgspec.structs.replace(stream.record, names=Names(conversation="c"))
    slow = Connection(stream, FAST)
    assert await asyncio.wait_for(stream.beats.get(), 10) == "data"
    async with slow.stuck():
        await stream.write(tokens("Hi", 5))
        await asyncio.sleep(0.02)
        stream.beats = asyncio.Queue()
        await asyncio.sleep(0.05)
        assert stream.beats.empty()
    await slow.leave()


async def test_no_heartbeat_follows_the_end_of_a_stream() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream, FAST)
    await client.until(lambda body: IDLE in body)
    await stream.write(ended(), FINISH)
    await asyncio.wait_for(client.task, 10)
    await asyncio.sleep(0.03)
    assert client.body.endswith(b"data: [DONE]\n\n")


async def test_a_heartbeat_delayed_by_a_slow_reader_does_not_follow_the_end() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream, FAST)
    await client.until(bool)
    async with client.stuck():
        await stream.write(ended(), FINISH)
        await asyncio.sleep(0.05)
    await asyncio.wait_for(client.task, 10)
    assert client.body.endswith(b"data: [DONE]\n\n")


async def test_ping_comments_are_sent_if_configured() -> None:
    config = msgspec.structs.replace(QUIET, sse_ping_interval=0.01)
    client = Connection(await open_stream(response_options=STREAMED), config)
    await client.until(lambda body: b": ping\n: ping\n" in body)
    await client.leave()


@pytest.mark.parametrize("options", [{"heartbeat": False}, {"ping_interval_s": -1}])
async def test_a_request_can_switch_off_heartbeats_and_pings(options: dict[str, Any]) -> None:
    config = msgspec.structs.replace(QUIET, sse_ping_interval=0.005)
    config = (
        msgspec.structs.replace(config, heartbeat_s=0.005) if "heartbeat" in options else config
    )
    quiet = {"ping_interval_s": -1}
    client = Connection(await open_stream(response_options=STREAMED | quiet | options), config)
    await asyncio.sleep(0.05)
    assert client.body.count(b"data: ") == ("heartbeat" not in options)
    assert b": ping" not in client.body
    await client.leave()


async def test_a_whole_answer_sends_newlines_as_heartbeats() -> None:
    stream = await open_stream(response_options={"heartbeat": True})
    client = Connection(stream, FAST)
    await client.until(lambda body: body.startswith(b"\n\n"))
    assert client.messages[0]["status"] == 200
    await stream.write(tokens("Hi", 5), ended(), FINISH)
    await asyncio.wait_for(client.task, 10)
    assert json.loads(client.body)["choices"][0]["message"]["content"] == "Hi"


@pytest.mark.parametrize("options", [{"heartbeat": True}, {"heartbeat": False}])
async def test_a_whole_answer_is_assembled_in_another_thread(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    whole = ChunkBody.whole
    monkeypatch.setattr(
        ChunkBody,
        "whole",
        lambda self: (threads.append(threading.current_thread()), whole(self))[1],
    )
    stream = await open_stream(response_options=options)
    client = Connection(stream)
    await stream.write(tokens("Hi", 5), ended(), FINISH)
    await asyncio.wait_for(client.task, 10)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_a_whole_answer_that_fails_late_still_gets_its_error_status() -> None:
    stream = await open_stream(response_options={"heartbeat": False})
    client = Connection(stream)
    await stream.write(tokens("Hi", 5), error("engine_failed"))
    await asyncio.wait_for(client.task, 10)
    headers = dict(client.messages[0]["headers"])
    assert client.messages[0]["status"] == 503
    assert headers[b"x-should-retry"] == b"true"
    assert headers[b"x-stream-id"] == stream.record.id.encode()
    assert json.loads(client.body)["error"]["code"] == "engine_failed"


async def test_an_error_in_mid_stream_is_not_followed_by_done() -> None:
    stream = await open_stream(response_options=STREAMED)
    client = Connection(stream)
    await stream.write(tokens("Hi", 5), error())
    await asyncio.wait_for(client.task, 10)
    assert b'"code":"engine_failed"' in client.body
    assert b"[DONE]" not in client.body


async def test_a_rendering_failure_becomes_an_error_in_mid_stream(caplog: Any) -> None:
    stream = await open_stream(response_options=WITH_IDS)
    client = Connection(stream)
    await stream.write(tokens("Hi", 5), tokens("Hi", 5, choice=7))
    await asyncio.wait_for(client.task, 10)
    assert b'"content":"Hi"' in client.body
    assert b'"code":"internal_error"' in client.body
    assert "IndexError" in caplog.text
    assert "IndexError" not in client.body.decode()


async def test_a_rendering_failure_adds_no_bytes_to_a_conversations_stream() -> None:
    stream = await open_stream(response_options=WITH_IDS)
    stream.record = msgspec.structs.replace(stream.record, names=Names(conversation="c"))
    client = Connection(stream)
    await stream.write(tokens("Hi", 5, choice=7))
    await asyncio.wait_for(client.task, 10)
    assert b"error" not in client.body and client.messages[-1]["more_body"] is False


@pytest.mark.parametrize("options", [STREAMED, {"heartbeat": True}, {"heartbeat": False}])
async def test_a_reader_of_a_deleted_stream_gets_stream_not_found(options: dict[str, Any]) -> None:
    stream = await open_stream(response_options=options)
    client = Connection(stream)
    await settle()
    stream.log.tail.forget()
    if options == {"heartbeat": False}:
        with pytest.raises(RequestError) as refused:
            await asyncio.wait_for(client.task, 10)
        assert refused.value.code == "stream_not_found"
    else:
        await asyncio.wait_for(client.task, 10)
        assert b'"code":"stream_not_found"' in client.body


async def test_a_reader_of_a_failing_store_gets_storage_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read(self: MemoryLog, after: int, limit: int) -> Any:
        raise StoreStalled("The disk fails.")

    stream = await open_stream(response_options=STREAMED)
    monkeypatch.setattr(MemoryLog, "read", read)
    client = Connection(stream)
    await asyncio.wait_for(client.task, 10)
    assert b'"code":"storage_stalled"' in client.body


async def test_work_ends_when_its_client_disconnects() -> None:
    async def leave() -> dict[str, str]:
        return {"type": "http.disconnect"}

    assert await while_connected(leave, asyncio.sleep(60, "done")) is None


async def test_work_returns_its_result_while_the_client_is_connected() -> None:
    async def stay() -> Any:
        await asyncio.Event().wait()

    assert await while_connected(stay, asyncio.sleep(0, "done")) == "done"
