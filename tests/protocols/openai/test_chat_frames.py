import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocols.dialect import encode
from headrace.protocols.openai import chat as openai_chat
from headrace.streams.events import AnyEvent, Heartbeat, Queued, Served
from headrace.streams.record import Record, ServedSetup
from tests.gateway.builders import (
    ended,
    error,
    log_of,
    logprob,
    make_record,
    make_request,
    progress,
    tokens,
)

HEAD = (
    b'"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"headrace-mini","system_fingerprint":"fp_3c1d5e8f9a02"'
)
ROLE = b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
STOP = b'{"index":0,"delta":{},"finish_reason":"stop","stop_reason":null}'
TIMINGS = (
    b'"timings":{"cache_n":0,"prompt_n":0,"prompt_ms":0.0,"prompt_per_token_ms":0.0,'
    b'"prompt_per_second":0.0,"predicted_n":2,"predicted_ms":10.0,"predicted_per_token_ms":10.0,'
    b'"predicted_per_second":100.0,"queue_ms":0.0,"max_gap_ms":10.0}'
)
USAGE = (
    b'"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":0}}'
)
HI = (tokens("H", 5, at_ms=10), tokens("ï", 6, at_ms=20), ended(at_ms=20))


def chunk(choice: bytes, more: bytes = b"") -> bytes:
    return b"data: {" + HEAD + b',"choices":[' + choice + b"]" + more + b"}\n\n"


def text(content: str, index: int = 0) -> bytes:
    delta = json.dumps({"content": content}, ensure_ascii=False, separators=(",", ":"))
    return b'{"index":%d,"delta":%s,"finish_reason":null}' % (index, delta.encode())


def record_of(**changes: Any) -> Record:
    return make_record(make_request(**changes))


def frames_of(record: Record, *events: AnyEvent) -> list[bytes]:
    frames = openai_chat.frames(record)
    return [frame for event in log_of(record, *events) for frame in frames.render(event)]


def answer_of(record: Record, *events: AnyEvent) -> bytes:
    answer = openai_chat.response_body(record)
    for event in log_of(record, *events):
        answer.feed(event)
    return encode(answer.whole())


def parsed(frames: list[bytes]) -> list[Any]:
    return [json.loads(frame[6:]) for frame in frames if frame != b"data: [DONE]\n\n"]


def test_a_stream_has_these_bytes() -> None:
    assert frames_of(record_of(), *HI) == [
        chunk(ROLE),
        chunk(text("H")),
        chunk(text("ï")),
        chunk(STOP, b"," + TIMINGS),
        b"data: [DONE]\n\n",
    ]


def test_usage_comes_last_together_with_the_timings() -> None:
    frames = frames_of(record_of(response_options={"include_usage": True}), *HI)
    assert frames[-3:] == [
        chunk(STOP),
        b"data: {" + HEAD + b',"choices":[],' + USAGE + b"," + TIMINGS + b"}\n\n",
        b"data: [DONE]\n\n",
    ]


def test_a_whole_answer_has_these_bytes() -> None:
    head = HEAD.replace(b".chunk", b"")
    choice = (
        '{"index":0,"message":{"role":"assistant","content":"Hï","refusal":null},'
        '"logprobs":null,"finish_reason":"stop","stop_reason":null}'
    ).encode()
    assert answer_of(record_of(), *HI) == (
        b"{" + head + b',"choices":[' + choice + b"]," + USAGE + b"," + TIMINGS + b"}"
    )


def test_a_heartbeat_has_these_bytes() -> None:
    idle = b'{"index":0,"delta":{},"finish_reason":null}'
    assert openai_chat.frames(record_of()).idle() == chunk(idle)


def test_a_recovery_has_these_bytes_and_is_named_only_on_request() -> None:
    event = Heartbeat(seq=0, at_ms=0, state="recovering", form="data", attempt=2)
    idle = b'{"index":0,"delta":{},"finish_reason":null}'
    named = record_of(response_options={"return_progress": True})
    assert frames_of(named, event)[1] == chunk(idle, b',"recovering":{"attempt":2}')
    assert frames_of(record_of(), event)[1] == chunk(idle)
    silent = {"heartbeat": False, "return_progress": True}
    assert frames_of(record_of(response_options=silent), event) == [b"data: [DONE]\n\n"]


def test_progress_in_words_is_reasoning() -> None:
    options = {"return_progress": True, "progress_in_words": True}
    told, said = frames_of(
        record_of(response_options=options), progress(1280, time_ms=30_000), *HI
    )[1:3]
    assert b'"prompt_progress":{"total":2048' in told
    line = "\u2063Processing the prompt: 62 %, 30 s left\n"
    delta = encode({"reasoning_content": line, "reasoning": line})
    assert said == chunk(b'{"index":0,"delta":' + delta + b',"finish_reason":null}')


def test_a_load_has_these_bytes_and_its_progress_only_on_request() -> None:
    event = Heartbeat(seq=0, at_ms=0, state="loading", form="data", progress=0.25)
    idle = b'{"index":0,"delta":{},"finish_reason":null}'
    named = record_of(response_options={"return_progress": True})
    assert frames_of(named, event)[1] == chunk(idle, b',"loading":{"progress":0.25}')
    assert frames_of(record_of(), event)[1] == chunk(idle)


def test_chunks_carry_the_fingerprint_once_it_is_known() -> None:
    record = msgspec.structs.replace(record_of(), system_fingerprint="")
    served = Served(seq=0, at_ms=0, system_fingerprint="fp_1", served=ServedSetup())
    frames = frames_of(record, served, tokens("hi"), ended())
    named = [json.loads(frame[6:])["system_fingerprint"] for frame in frames[:-1]]
    assert named == [None, "fp_1", "fp_1"]
    body = openai_chat.response_body(record)
    for event in log_of(record, served, tokens("hi"), ended()):
        body.feed(event)
    assert body.whole()["system_fingerprint"] == "fp_1"


def test_progress_has_these_bytes_and_is_sent_only_on_request() -> None:
    event = progress(1024, time_ms=900)
    idle = b'{"index":0,"delta":{},"finish_reason":null}'
    more = b',"prompt_progress":{"total":2048,"cache":512,"processed":1024,"time_ms":900}'
    assert frames_of(record_of(response_options={"return_progress": True}), event)[1] == chunk(
        idle, more
    )
    assert frames_of(record_of(), event)[1:] == [b"data: [DONE]\n\n"]


def test_progress_in_the_form_of_llama_cpp_has_no_choices() -> None:
    options = {"return_progress": True, "progress_as_llama_cpp": True}
    (_, frame, _) = frames_of(record_of(response_options=options), progress(1024, time_ms=900))
    told = json.loads(frame[6:])
    assert told["choices"] == [] and told["prompt_progress"]["processed"] == 1024


def test_the_queue_position_has_these_bytes_and_is_sent_only_on_request() -> None:
    event = Queued(seq=0, at_ms=0, position=3, waiting=7, eta_ms=1200)
    idle = b'{"index":0,"delta":{},"finish_reason":null}'
    more = b',"queue":{"position":3,"waiting":7,"eta_ms":1200}'
    assert frames_of(record_of(response_options={"return_progress": True}), event)[1] == chunk(
        idle, more
    )
    assert frames_of(record_of(), event)[1:] == [b"data: [DONE]\n\n"]


def test_an_error_in_mid_stream_has_no_done() -> None:
    frames = frames_of(record_of(), tokens("H", 5), error())
    assert frames[-1] == (
        b'data: {"error":{"message":"The engine stopped and could not be restarted.",'
        b'"type":"unavailable_error","param":null,"code":"engine_failed"}}\n\n'
    )
    assert len(frames) == 3


def test_each_choice_has_a_role_and_an_end_and_the_last_frame_has_timings() -> None:
    events = (tokens("a", 1), tokens("b", 2, choice=1), ended(choice=1), ended("length"))
    frames = parsed(frames_of(record_of(n=2), *events))
    assert [frame["choices"][0]["index"] for frame in frames] == [0, 1, 0, 1, 1, 0]
    assert ["timings" in frame for frame in frames] == [False] * 5 + [True]


def test_held_text_is_sent_before_the_finish_reason() -> None:
    frames = parsed(frames_of(record_of(), tokens("held", 4, end=ended().end)))
    assert frames[1]["choices"][0]["delta"] == {"content": "held"}
    assert frames[2]["choices"][0]["delta"] == {}


def test_the_finish_reason_of_a_stop_string_is_stop() -> None:
    (choice,) = parsed(frames_of(record_of(), ended("stop", "\n\n")))[-1]["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\n\n")
    assert json.loads(answer_of(record_of(), ended("stop", 7)))["choices"][0]["stop_reason"] == 7


def test_tokens_without_text_send_no_frame() -> None:
    assert len(frames_of(record_of(), tokens("", 5), tokens("", 6), ended())) == 3


def test_without_heartbeats_the_role_waits_for_the_first_text() -> None:
    record = record_of(response_options={"heartbeat": False})
    frames = openai_chat.frames(record)
    rendered = [frames.render(event) for event in log_of(record, tokens("", 4), *HI)]
    assert [len(each) for each in rendered] == [0, 0, 2, 1, 1, 1]
    assert rendered[2][0] == chunk(ROLE)


def test_continuous_usage_rides_on_text_and_finish() -> None:
    frames = parsed(frames_of(record_of(response_options={"continuous_usage": True}), *HI))
    assert [f["usage"]["completion_tokens"] for f in frames[1:]] == [1, 2, 2]
    assert "usage" not in frames[0]


def test_timings_per_token_ride_on_every_text() -> None:
    frames = parsed(frames_of(record_of(response_options={"timings_per_token": True}), *HI))
    assert [f["timings"]["predicted_n"] for f in frames[1:]] == [1, 2, 2]


def test_timings_count_draft_tokens_if_there_were_any() -> None:
    guessed = msgspec.structs.replace(tokens("ab", 1, 2), num_guessed=4, num_accepted=1)
    for event, expected in ((guessed, (4, 1)), (tokens("ab", 1, 2), (None, None))):
        *_, last = parsed(frames_of(record_of(), event, ended()))
        assert (last["timings"].get("draft_n"), last["timings"].get("draft_n_accepted")) == expected


def test_joined_token_ids_are_the_counted_tokens() -> None:
    record = record_of(response_options={"return_token_ids": True})
    events = (tokens("", 1), tokens("ab", 2), tokens("", 3), ended(ids=(4,)))
    frames = parsed(frames_of(record, *events))
    assert [frame["choices"][0].get("token_ids") for frame in frames] == [None, [1, 2], [3, 4]]
    assert [frame.get("prompt_token_ids") for frame in frames] == [None, [104, 105], None]
    whole = json.loads(answer_of(record, *events))
    assert whole["choices"][0]["token_ids"] == [1, 2, 3, 4]
    assert whole["prompt_token_ids"] == [104, 105]


ENTRIES = (logprob("H", -0.5, logprob("H", -0.5)), logprob("ï", -0.25))


def test_log_probabilities_come_before_the_finish_reason() -> None:
    frames = frames_of(record_of(num_logprobs=1), tokens("Hï", 5, 6, logprobs=ENTRIES), ended())
    entry = b'{"token":"H","logprob":-0.5,"bytes":[72]'
    assert frames[1] == chunk(
        '{"index":0,"delta":{"content":"Hï"},"logprobs":{"content":['.encode()
        + entry
        + b',"top_logprobs":['
        + entry
        + b"}]},"
        + '{"token":"ï","logprob":-0.25,"bytes":[195,175],"top_logprobs":[]}'.encode()
        + b'],"refusal":null},"finish_reason":null}'
    )


def test_joined_logprobs_equal_the_whole() -> None:
    record = record_of(num_logprobs=1)
    events = [tokens(e.token, 1, logprobs=(e,)) for e in ENTRIES]
    joined = [
        entry
        for frame in parsed(frames_of(record, *events, ended()))
        for entry in (frame["choices"][0].get("logprobs") or {}).get("content", [])
    ]
    whole = json.loads(answer_of(record, *events, ended()))["choices"][0]["logprobs"]
    assert whole == {"content": joined, "refusal": None}
    assert len(joined) == 2


@given(st.lists(st.text(max_size=4), max_size=8))
def test_joined_deltas_equal_the_answer(texts: list[str]) -> None:
    events = [*(tokens(text, 1) for text in texts), ended()]
    frames = frames_of(record_of(), *events)
    deltas = [frame["choices"][0]["delta"].get("content", "") for frame in parsed(frames)]
    whole = json.loads(answer_of(record_of(), *events))
    assert "".join(deltas) == whole["choices"][0]["message"]["content"] == "".join(texts)
    assert all(frame.count(b"\n") == 2 and frame.endswith(b"\n\n") for frame in frames)
