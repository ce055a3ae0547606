import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.dialect import encode
from headrace.streams.events import AnyEvent, Heartbeat, Queued
from headrace.streams.record import RENDERING, Record
from headrace_common.errors import RequestError
from headrace_common.pieces import CONTENT, REASONING, TOOL
from headrace_common.request import Channels
from tests.gateway.builders import (
    ended,
    error,
    log_of,
    make_record,
    make_request,
    piece,
    progress,
    tokens,
)

ROUTE = "/v1/messages"
ID = "msg_0123456789abcdef0123456789abcdef"
HEAD = (
    f'"id":"{ID}","type":"message","role":"assistant","model":"headrace-mini"'
    ',"content":[%s],"stop_reason":%s,"stop_sequence":%s,"usage":%s'
)
USAGE = (
    '{"input_tokens":%d,"output_tokens":%d,'
    '"cache_creation_input_tokens":0,"cache_read_input_tokens":%d%s}'
)
START = HEAD % ("", "null", "null", USAGE % (2, 0, 0, ""))
CALL = (
    piece("", TOOL, 0, "add"),
    piece('{"a"', TOOL, 0),
    piece(": 1}", TOOL, 0),
)
TOOL_ID = "toolu_1c63b46104aa73cc1f1178f5"


def frame(kind: str, more: str = "") -> bytes:
    return f'event: {kind}\ndata: {{"type":"{kind}"{more}}}\n\n'.encode()


def begin(index: int, block: str) -> bytes:
    return frame("content_block_start", f',"index":{index},"content_block":{block}')


def delta(index: int, shown: str) -> bytes:
    return frame("content_block_delta", f',"index":{index},"delta":{shown}')


def stop(index: int) -> bytes:
    return frame("content_block_stop", f',"index":{index}')


def last(reason: str, usage: str, sequence: str = "null") -> list[bytes]:
    shown = f',"delta":{{"stop_reason":"{reason}","stop_sequence":{sequence}}},"usage":{usage}'
    return [frame("message_delta", shown), frame("message_stop")]


def record_of(rendering: int = RENDERING, **changes: Any) -> Record:
    record = make_record(make_request(ROUTE, **changes))
    return msgspec.structs.replace(record, rendering=rendering)


def frames_of(record: Record, *events: AnyEvent) -> list[bytes]:
    frames = anthropic_messages.frames(record)
    return [one for event in log_of(record, *events) for one in frames.render(event)]


def answer_of(record: Record, *events: AnyEvent) -> dict[str, Any]:
    body = anthropic_messages.response_body(record)
    for event in log_of(record, *events):
        body.feed(event)
    return dict(json.loads(encode(body.whole())))


def test_a_streamed_text_has_these_bytes() -> None:
    assert frames_of(record_of(), tokens("H", 5), tokens("ï", 6), ended()) == [
        frame("message_start", f',"message":{{{START}}}'),
        begin(0, '{"type":"text","text":""}'),
        delta(0, '{"type":"text_delta","text":"H"}'),
        delta(0, '{"type":"text_delta","text":"ï"}'),
        stop(0),
        *last("end_turn", USAGE % (2, 2, 0, "")),
    ]


def test_thoughts_and_a_call_have_these_bytes() -> None:
    events = (piece("Hm.", REASONING), tokens("So.", 7), *CALL, ended("tool_calls"))
    call = f'{{"type":"tool_use","id":"{TOOL_ID}","name":"add","input":{{}}}}'
    thought = ',"output_tokens_details":{"thinking_tokens":1}'
    assert frames_of(record_of(), *events) == [
        frame("message_start", f',"message":{{{START}}}'),
        begin(0, '{"type":"thinking","thinking":"","signature":""}'),
        delta(0, '{"type":"thinking_delta","thinking":"Hm."}'),
        delta(0, '{"type":"signature_delta","signature":""}'),
        stop(0),
        begin(1, '{"type":"text","text":""}'),
        delta(1, '{"type":"text_delta","text":"So."}'),
        stop(1),
        begin(2, call),
        delta(2, '{"type":"input_json_delta","partial_json":"{\\"a\\""}'),
        delta(2, '{"type":"input_json_delta","partial_json":": 1}"}'),
        stop(2),
        *last("tool_use", USAGE % (2, 5, 0, thought)),
    ]


def test_a_whole_answer_has_these_bytes() -> None:
    record = record_of()
    body = anthropic_messages.response_body(record)
    for event in log_of(record, piece("Hm.", REASONING), *CALL, ended("tool_calls")):
        body.feed(event)
    blocks = (
        '{"type":"thinking","thinking":"Hm.","signature":""},'
        f'{{"type":"tool_use","id":"{TOOL_ID}","name":"add","input":{{"a":1}}}}'
    )
    usage = USAGE % (2, 4, 0, ',"output_tokens_details":{"thinking_tokens":1}')
    assert encode(body.whole()).decode() == "{" + HEAD % (blocks, '"tool_use"', "null", usage) + "}"


def test_a_toolset_call_names_the_toolset_and_its_member() -> None:
    channels = Channels("hermes", toolsets={"computer__wait": "computer"})
    record = make_record(make_request(ROUTE, channels=channels))
    events = (piece("", TOOL, 0, "computer__wait"), piece("{}", TOOL, 0), ended("tool_calls"))
    body = anthropic_messages.response_body(record)
    for event in log_of(record, *events):
        body.feed(event)
    (call,) = body.whole()["content"]
    assert call.items() >= {"name": "wait", "toolset_name": "computer"}.items()
    assert begin(0, encode(call).decode()) in frames_of(record, *events)


def test_two_calls_are_two_blocks_with_different_ids() -> None:
    other = (piece("", TOOL, 1, "add"), piece("{}", TOOL, 1))
    first, second = answer_of(record_of(), *CALL, *other, ended("tool_calls"))["content"]
    assert first["id"] != second["id"]
    assert (first["input"], second["input"]) == ({"a": 1}, {})


@pytest.mark.parametrize("arguments", ['{"a": "un', "{]", '{"a": 1e999}', "{" * 2000])
def test_arguments_that_are_not_json_are_empty_in_a_whole_answer(arguments: str) -> None:
    call = (piece("", TOOL, 0, "add"), piece(arguments, TOOL, 0))
    (block,) = answer_of(record_of(), *call, ended("length"))["content"]
    assert block["input"] == {}


def test_cached_tokens_are_counted_apart() -> None:
    answer = answer_of(record_of(), progress(2, 2, cache=1), tokens("H", 5), ended())
    assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (1, 1)


def test_each_finish_reason_maps_to_a_stop_reason() -> None:
    request = make_request(ROUTE)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=1)

    def reason(end: AnyEvent, *events: AnyEvent) -> tuple[str, str | None]:
        answer = answer_of(record_of(sampling=sampling), *events, end)
        return answer["stop_reason"], answer["stop_sequence"]

    assert reason(ended()) == ("end_turn", None)
    assert reason(ended("stop", 7)) == ("end_turn", None)
    assert reason(ended("stop", "\n\n")) == ("stop_sequence", "\n\n")
    assert reason(ended("length"), tokens("H", 5)) == ("max_tokens", None)
    assert reason(ended("length")) == ("model_context_window_exceeded", None)


def test_idle_frames_are_pings_once_the_message_has_started() -> None:
    frames = anthropic_messages.frames(record_of())
    assert frames.idle() == b": ping\n"
    frames.render(log_of(record_of())[0])
    assert frames.idle() == frame("ping")


SIGN = Heartbeat(seq=0, at_ms=0, state="prompt", form="sign")


def kinds_of(frames: list[bytes]) -> list[str]:
    """Return each event's name with the type and the text of its block or delta."""
    found = []
    for one in frames:
        told = json.loads(one.split(b"data: ")[1])
        inner = told.get("content_block") or told.get("delta") or {}
        words = (told["type"], inner.get("type"), inner.get("text") or inner.get("thinking"))
        found.append(" ".join(filter(None, words)))
    return found


def test_a_heartbeat_before_the_first_text_opens_the_text_block() -> None:
    frames = frames_of(record_of(), SIGN, SIGN, tokens("Hi"), ended())
    assert kinds_of(frames) == [
        "message_start",
        "content_block_start text",
        "content_block_delta text_delta",
        "content_block_delta text_delta",
        "content_block_delta text_delta Hi",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_heartbeat_is_an_empty_delta_of_the_open_block() -> None:
    thought = piece("Hm", REASONING)
    frames = frames_of(record_of(), thought, SIGN, tokens("Hi"), SIGN, ended())
    assert kinds_of(frames)[1:-3] == [
        "content_block_start thinking",
        "content_block_delta thinking_delta Hm",
        "content_block_delta thinking_delta",
        "content_block_delta signature_delta",
        "content_block_stop",
        "content_block_start text",
        "content_block_delta text_delta Hi",
        "content_block_delta text_delta",
    ]


def test_a_heartbeat_after_the_last_block_is_a_ping() -> None:
    frames = frames_of(record_of(), tokens("Hi"), ended(), SIGN)
    assert frames[-3] == frame("ping")


def test_a_stream_of_an_earlier_version_keeps_its_format() -> None:
    frames = frames_of(record_of(rendering=0), SIGN, tokens("Hi"), ended())
    assert frames[1] == frame("ping") and kinds_of(frames)[2] == "content_block_start text"


def test_no_heartbeat_is_sent_if_heartbeats_are_off() -> None:
    silent = record_of(response_options={"heartbeat": False})
    assert frames_of(silent, SIGN, tokens("Hi"), ended()) == frames_of(
        silent, tokens("Hi"), ended()
    )


def test_queue_progress_and_recovery_ride_on_pings_if_asked_for() -> None:
    events = (
        Queued(seq=0, at_ms=0, position=3, waiting=7, eta_ms=1200),
        progress(1024, time_ms=900),
        Heartbeat(seq=0, at_ms=0, state="recovering", form="data", attempt=2),
        Heartbeat(seq=0, at_ms=0, state="loading", form="data", progress=0.25),
    )
    pings = [
        frame("ping", ',"queue":{"position":3,"waiting":7,"eta_ms":1200}'),
        frame(
            "ping",
            ',"prompt_progress":{"total":2048,"cache":512,"processed":1024,"time_ms":900}',
        ),
        frame("ping", ',"recovering":{"attempt":2}'),
        frame("ping", ',"loading":{"progress":0.25}'),
    ]
    assert (
        frames_of(record_of(response_options={"return_progress": True}), *events, ended())[1:5]
        == pings
    )
    assert frames_of(record_of(), *events, ended())[1] == frame("ping")
    early = frames_of(
        record_of(response_options={"return_progress": True, "heartbeat": False}),
        events[0],
        ended(),
    )
    assert early[0].startswith(b"event: message_start\n") and early[1] == pings[0]


def test_a_heartbeat_carries_the_progress_until_the_prompt_is_read() -> None:
    asked = {"response_options": {"return_progress": True}}
    told = ',"prompt_progress":{"total":2048,"cache":512,"processed":1024,"time_ms":900}'
    events = (progress(1024, time_ms=900), SIGN, tokens("Hi", 5), SIGN, ended())
    empty = ',"index":0,"delta":{"type":"text_delta","text":""}'
    frames = frames_of(record_of(**asked), *events)
    assert [one for one in frames if empty.encode() in one] == [
        frame("content_block_delta", empty + told),
        frame("content_block_delta", empty),
    ]
    for other in (record_of(), record_of(rendering=1, **asked)):  # unasked, and an older stream
        assert frame("content_block_delta", empty + told) not in frames_of(other, *events)


def test_progress_in_words_opens_the_thinking_block_of_the_model() -> None:
    options = {"return_progress": True, "progress_in_words": True}
    slow = progress(1280, time_ms=30_000)
    thought = piece("Hm.", REASONING)
    frames = frames_of(
        record_of(response_options=options), slow, SIGN, thought, tokens("Hi", 5), ended()
    )
    assert kinds_of(frames)[2:7] == [
        "content_block_start thinking",
        "content_block_delta thinking_delta \u2063Processing the prompt: 62 %, 30 s left\n",
        "content_block_delta thinking_delta",
        "content_block_delta thinking_delta Hm.",
        "content_block_delta signature_delta",
    ]


def test_without_heartbeats_the_start_waits_for_the_first_text() -> None:
    record = record_of(response_options={"heartbeat": False})
    frames = anthropic_messages.frames(record)
    rendered = [frames.render(e) for e in log_of(record, tokens("", 4), tokens("H", 5), ended())]
    assert [len(each) for each in rendered] == [0, 0, 3, 1, 2]


def test_an_error_in_mid_stream_is_an_event_and_the_last() -> None:
    assert frames_of(record_of(), tokens("H", 5), error())[-1] == (
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":'
        b'"The engine stopped and could not be restarted.","param":null,'
        b'"code":"engine_failed"}}\n\n'
    )


def test_the_message_for_a_too_long_prompt_has_the_words_that_clients_match() -> None:
    extra = {"n_prompt_tokens": 5000, "n_ctx": 4096}
    refused = RequestError("context_length_exceeded", "…", "messages", extra)
    body = json.loads(anthropic_messages.ERRORS.body(refused, "req"))
    assert body["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"
    assert body["request_id"] == "req"
    told = "However, your messages resulted in at least 5000 tokens."
    estimated = RequestError("context_length_exceeded", told, "messages", extra)
    words = json.loads(anthropic_messages.ERRORS.body(estimated))["error"]["message"]
    assert words.startswith(body["error"]["message"]) and "at least" in words


PIECES = st.builds(
    piece, st.text(max_size=3), st.sampled_from([CONTENT, REASONING]), st.just(-1), st.just("")
)


@given(st.lists(PIECES, max_size=8))
def test_joined_deltas_equal_the_answer(events: list[AnyEvent]) -> None:
    blocks: list[dict[str, Any]] = []
    for one in frames_of(record_of(), *events, ended()):
        name, _, payload = one.partition(b"\ndata: ")
        shown = json.loads(payload)
        assert name == b"event: " + shown["type"].encode()
        if shown["type"] == "content_block_start":
            blocks.append(shown["content_block"])
            assert shown["index"] == len(blocks) - 1
        if shown["type"] == "content_block_delta":
            for key in ("text", "thinking"):
                if key in shown["delta"]:
                    blocks[-1][key] += shown["delta"][key]
    assert blocks == answer_of(record_of(), *events, ended())["content"]
