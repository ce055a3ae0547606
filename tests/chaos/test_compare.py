"""Tests that the oracle finds the damage in answers that were altered on purpose."""

import asyncio

from stress.catalog import TEXT, Question
from stress.compare import compare
from stress.frames import Said, own_dropped
from stress.http import Reply
from stress.oracle import judge_plain
from stress.story import Story, Way
from stress.witness import Fate, Fates, Passage, Proxy
from tools.harness.sse import frames_of

TRUTH = [5, 6, 7, 8, 9, 10]


def kinds(got: list[int]) -> dict[str, int]:
    return {violation.kind: violation.number for violation in compare(got, TRUTH, "it")}


def test_equal_answers_have_no_violation() -> None:
    assert kinds([*TRUTH]) == {}


def test_each_kind_of_damage_is_named_and_counted() -> None:
    assert kinds([5, 6, 9, 10]) == {"lost": 2}
    assert kinds([5, 6, 7, 6, 7, 8, 9, 10]) == {"repeated": 2}
    assert kinds([5, 7, 6, 8, 9, 10]) == {"reordered": 2}
    assert kinds([5, 6, 7, 8, 9, 11]) == {"changed": 1}


def plain_story(frames: bytes, outcome: str) -> Story:
    question = Question(TEXT, {}, Said({0: [1, 2, 3]}, {0: "abc"}, {0: "length"}))
    story = Story("s", question, Way("event", "plain"), 1.0)
    story.frames, story.outcome = frames_of(frames), outcome
    return story


def chunk(token: int, text: str) -> bytes:
    choice = f'{{"index":0,"text":"{text}","token_ids":[{token}],"finish_reason":null}}'
    return f'data: {{"choices":[{choice}]}}\n\n'.encode()


def test_an_interrupted_answer_must_be_a_prefix_of_the_whole() -> None:
    assert judge_plain(plain_story(chunk(1, "a") + chunk(2, "b"), "cut")) == []
    assert judge_plain(plain_story(chunk(1, "a") + chunk(3, "c"), "cut"))[0].kind == "changed"


def test_an_answer_that_ends_early_has_lost_tokens() -> None:
    found = judge_plain(plain_story(chunk(1, "a") + chunk(2, "b"), "finished"))
    assert (found[0].kind, found[0].number) == ("lost", 1)


def test_partial_frames_comments_and_extra_frames_are_ignored() -> None:
    body = b'id: s:0\ndata: {}\n\n: ping\ndata: {"own":1}\n\nid: s:1\ndata: [DONE]\n\nid: s:2\nda'
    assert [frame.id for frame in frames_of(body)] == ["s:0", None, "s:1"]
    assert [frame.is_done for frame in own_dropped(frames_of(body))] == [False, True]


def test_the_proxy_records_the_bytes_that_a_lost_connection_withholds() -> None:
    async def run() -> tuple[bytes, Passage]:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"0123456789")
            await writer.drain()

        server = await asyncio.start_server(say, "127.0.0.1", 0)
        proxy = Proxy(server.sockets[0].getsockname()[1], AlwaysCut("", 1.0))
        await proxy.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"?")
        got = await reader.read()
        passage = proxy.passage(writer.get_extra_info("sockname")[1])
        assert passage is not None
        await passage.done.wait()
        return got, passage

    got, passage = asyncio.run(run())
    assert got == b"0123"
    assert bytes(passage.answer) == b"0123456789" and passage.was_cut


class AlwaysCut(Fates):
    def draw(self) -> Fate:
        return Fate("fin", 4)


def test_a_truncated_body_is_not_a_whole_reply() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Stream-Id: s\r\nTransfer-Encoding: chunked\r\n\r\n"
    broken = Reply.of(head + b"5\r\nhello\r\n3\r\nwo")
    assert (bytes(broken.body), broken.is_whole, broken.stream_id) == (b"hellowo", False, "s")
    assert Reply.of(head + b"2\r\nhi\r\n0\r\n\r\n").is_whole
