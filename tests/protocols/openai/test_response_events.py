"""Tests the bytes of /v1/responses: numbered events and the final response."""

import json
from typing import Any

import msgspec
import pytest

from headrace.gateway.responses_routes import _FramesAfter
from headrace.protocols.dialect import encode
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.openai.response_events import StoredBody
from headrace.protocols.progress_text import without_progress
from headrace.streams.events import AnyEvent, ChoiceEnd, Heartbeat, Queued, Tokens
from headrace.streams.record import RENDERING, Record
from headrace_common.pieces import REASONING, TOOL, ChannelPiece
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

ID = "resp_0123456789abcdef0123456789abcdef"
HI = (tokens("H", 5, at_ms=10), tokens("ï", 6, at_ms=20), ended(at_ms=20))
HEAD = {
    "id": ID,
    "object": "response",
    "created_at": 1790000000,
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "model": "headrace-mini",
    "output": [],
    "temperature": 1.0,
    "top_p": 1.0,
    "usage": None,
}
USAGE = {
    "input_tokens": 2,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 4,
}


def record_of(**changes: Any) -> Record:
    return make_record(make_request("/v1/responses", **changes))


def frames_of(record: Record, *events: AnyEvent) -> list[bytes]:
    frames = openai_responses.frames(record)
    return [frame for event in log_of(record, *events) for frame in frames.render(event)]


def answer_of(record: Record, *events: AnyEvent) -> Any:
    response = openai_responses.response_body(record)
    for event in log_of(record, *events):
        response.feed(event)
    return json.loads(encode(response.whole()))


def told(frames: list[bytes]) -> list[Any]:
    """Return the data of each frame; assert that the event's name is its type."""
    found = []
    for frame in frames:
        name, data = frame.decode().removesuffix("\n\n").split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def numbered(*events: dict[str, Any]) -> list[bytes]:
    """Return the frames of these events, numbered from 0."""
    return [
        f"event: {event['type']}\ndata: ".encode()
        + encode({"type": event["type"], "sequence_number": number} | event)
        + b"\n\n"
        for number, event in enumerate(events)
    ]


def piece(text: str, channel: str, call: int = -1, name: str = "") -> Tokens:
    return Tokens(
        seq=0, at_ms=0, choice=0, ids=(1,), pieces=(ChannelPiece(text, channel, call, name),)
    )


CALL = (
    piece("", TOOL, 0, "add"),
    piece('{"a"', TOOL, 0),
    piece(":1}", TOOL, 0),
    ended("tool_calls"),
)
THOUGHT = (piece("Hm", REASONING), tokens("Hi", 5), ended())


def test_a_streamed_text_has_these_bytes() -> None:
    frames = frames_of(record_of(), *HI)
    id = told(frames)[2]["item"]["id"]
    place: dict[str, Any] = {"item_id": id, "output_index": 0}
    shown = {"type": "output_text", "annotations": [], "logprobs": []}
    item = {"id": id, "type": "message", "status": "in_progress", "role": "assistant"}
    done = item | {"status": "completed", "content": [shown | {"text": "Hï"}]}
    part = place | {"content_index": 0}
    last = HEAD | {"status": "completed", "completed_at": 1790000000, "output": [done]}
    assert frames == numbered(
        {"type": "response.created", "response": HEAD},
        {"type": "response.in_progress", "response": HEAD},
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
        {"type": "response.content_part.added", **part, "part": shown | {"text": ""}},
        {"type": "response.output_text.delta", **part, "delta": "H", "logprobs": []},
        {"type": "response.output_text.delta", **part, "delta": "ï", "logprobs": []},
        {"type": "response.output_text.done", **part, "text": "Hï", "logprobs": []},
        {"type": "response.content_part.done", **part, "part": shown | {"text": "Hï"}},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": last | {"usage": USAGE}},
    )


def test_streamed_reasoning_has_these_bytes() -> None:
    frames = frames_of(record_of(), *THOUGHT)[2:8]
    id = told(frames)[0]["item"]["id"]
    item = {"id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    part = {"item_id": id, "output_index": 0, "content_index": 0}
    text = {"type": "reasoning_text", "text": "Hm"}
    done = item | {"status": "completed", "content": [text]}
    assert (
        frames
        == numbered(
            {"type": ""},
            {"type": ""},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **part, "part": text | {"text": ""}},
            {"type": "response.reasoning_text.delta", **part, "delta": "Hm"},
            {"type": "response.reasoning_text.done", **part, "text": "Hm"},
            {"type": "response.content_part.done", **part, "part": text},
            {"type": "response.output_item.done", "output_index": 0, "item": done},
        )[2:]
    )
    assert id.startswith("rs_")


def test_a_streamed_call_has_these_bytes() -> None:
    frames = frames_of(record_of(), *CALL)[2:7]
    shown = told(frames)[0]["item"]
    place = {"item_id": shown["id"], "output_index": 0}
    item = {"id": shown["id"], "type": "function_call", "status": "in_progress", "arguments": ""}
    item |= {"call_id": shown["call_id"], "name": "add"}
    done = item | {"status": "completed", "arguments": '{"a":1}'}
    assert (
        frames
        == numbered(
            {"type": ""},
            {"type": ""},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.function_call_arguments.delta", **place, "delta": '{"a"'},
            {"type": "response.function_call_arguments.delta", **place, "delta": ":1}"},
            {
                "type": "response.function_call_arguments.done",
                **place,
                "name": "add",
                "arguments": '{"a":1}',
            },
            {"type": "response.output_item.done", "output_index": 0, "item": done},
        )[2:]
    )
    assert shown["id"].startswith("fc_") and shown["call_id"].startswith("call_")


def test_output_items_keep_their_order_and_have_different_ids() -> None:
    two_calls = (*THOUGHT[:2], *CALL[:3], piece("{}", TOOL, 1, "sub"), ended("tool_calls"))
    response = told(frames_of(record_of(), *two_calls))[-1]["response"]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in response["output"]] == kinds
    assert len({item["id"] for item in response["output"]}) == 4


@pytest.mark.parametrize("events", [HI, THOUGHT, CALL, (ended("length"),), (error(),)])
def test_the_last_event_has_the_whole_response(events: tuple[AnyEvent, ...]) -> None:
    last = told(frames_of(record_of(), *events))[-1]
    assert last["response"] == answer_of(record_of(), *events)
    assert last["type"] in ("response.completed", "response.incomplete", "response.failed")


def test_an_answer_that_runs_out_of_tokens_is_incomplete() -> None:
    cut_off = Tokens(seq=0, at_ms=0, choice=0, end=ChoiceEnd("length", None))
    last = told(frames_of(record_of(), tokens("Hi", 5), cut_off))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_an_answer_without_text_is_an_empty_message() -> None:
    (item,) = answer_of(record_of(), ended(ids=(2,)))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_response_that_was_cut_fails_with_its_partial_output() -> None:
    last = told(frames_of(record_of(), tokens("Hi", 5), error()))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "engine_failed"
    assert last["response"]["output"][0]["content"][0]["text"] == "Hi"


def test_a_stream_that_was_stopped_is_cancelled() -> None:
    assert answer_of(record_of(), error("cancelled"))["status"] == "cancelled"


def test_a_background_response_is_queued_until_work_starts() -> None:
    record = record_of(response_options={"background": True})
    events = told(frames_of(record, progress(600), *HI))
    kinds = [event["type"] for event in events[:4]]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    statuses = [event["response"]["status"] for event in events[:3]]
    assert statuses == ["queued", "queued", "in_progress"]


def test_a_keepalive_repeats_the_last_number() -> None:
    beat = b'event: keepalive\ndata: {"type":"keepalive","sequence_number":1}\n\n'
    event = Heartbeat(seq=0, at_ms=0, state="prompt", form="data")
    assert frames_of(record_of(), event)[2] == beat
    assert (
        frames_of(record_of(response_options={"heartbeat": False}), event)[2:]
        == frames_of(record_of(response_options={"heartbeat": False}))[2:]
    )


def test_a_keepalive_before_the_first_resumed_event_repeats_the_cursor() -> None:
    """Uses any number as the cursor, since a client may resume after any event."""
    resumed = _FramesAfter(record_of(), 23)
    resumed.render(progress(600))
    (beat,) = told([resumed.idle()])
    assert beat == {"type": "keepalive", "sequence_number": 23}


def test_queue_progress_and_recovery_ride_on_keepalives_if_asked_for() -> None:
    queued = Queued(seq=0, at_ms=0, position=3, waiting=7, eta_ms=None)
    recovery = Heartbeat(seq=0, at_ms=0, state="recovering", form="data", attempt=2)
    record = record_of(response_options={"return_progress": True})
    load = Heartbeat(seq=0, at_ms=0, state="loading", form="data", progress=0.25)
    beats = told(frames_of(record, queued, progress(1024), recovery, load))[2:6]
    assert {beat["type"] for beat in beats} == {"keepalive"}
    assert {beat["sequence_number"] for beat in beats} == {1}
    assert [list(beat)[2] for beat in beats] == [
        "queue",
        "prompt_progress",
        "recovering",
        "loading",
    ]
    assert len(told(frames_of(record_of(), queued, progress(1024)))) == 3


def test_a_call_of_a_function_in_a_namespace_names_both() -> None:
    kept = msgspec.msgpack.encode(StoredBody(namespaces={"mcp__w__get": "mcp__w"}))
    call = (piece("", TOOL, 0, "mcp__w__get"), piece("{}", TOOL, 0), ended("tool_calls"))
    events = told(frames_of(record_of(kept=kept), *call))
    shown = [event["item"] for event in events if "item" in event]
    assert {(item["name"], item["namespace"]) for item in shown} == {("get", "mcp__w")}
    assert events[-1]["response"]["output"][0]["name"] == "get"
    plain = told(frames_of(record_of(), *call))[-1]["response"]["output"][0]
    assert plain["name"] == "mcp__w__get" and "namespace" not in plain


def test_progress_is_sent_on_a_numbered_event() -> None:
    options = {"return_progress": True}
    record = msgspec.structs.replace(record_of(response_options=options), rendering=RENDERING)
    event = told(frames_of(record, progress(1024)))[2]
    assert (event["type"], event["sequence_number"]) == ("response.in_progress", 2)
    assert (event["response"]["id"], event["response"]["status"]) == (record.id, "in_progress")
    assert event["prompt_progress"]["processed"] == 1024


def test_progress_in_words_opens_the_reasoning_item_of_the_model() -> None:
    options = {"return_progress": True, "progress_in_words": True}
    record = msgspec.structs.replace(record_of(response_options=options), rendering=RENDERING)
    slow = progress(1280, time_ms=30_000)
    events = told(frames_of(record, slow, piece("Hm.", REASONING), tokens("Hi", 5), ended()))
    said = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert [without_progress(part) for part in said] == ["", "Hm."] and "62 %" in said[0]
    reasoning, message = events[-1]["response"]["output"]
    assert reasoning["content"][0]["text"] == "".join(said)
    assert message["content"][0]["text"] == "Hi"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(numbers)))


def test_deltas_and_the_final_text_carry_logprobs() -> None:
    entry = logprob("H", -0.5, logprob("J", -1.5))
    events = told(frames_of(record_of(num_logprobs=1), tokens("H", 5, logprobs=(entry,)), ended()))
    shown = {"token": "H", "bytes": [72], "logprob": -0.5}
    other = {"token": "J", "bytes": [74], "logprob": -1.5}
    assert events[4]["logprobs"] == [shown | {"top_logprobs": [other]}]
    assert events[5]["logprobs"] == events[4]["logprobs"]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == events[4]["logprobs"]


@pytest.mark.parametrize(
    ("events", "phases"),
    [
        (HI, ["final_answer"]),
        ((tokens("I look.", 5), *CALL), ["commentary", None]),
        ((tokens("I think.", 5), *THOUGHT), ["commentary", None, "final_answer"]),
        ((tokens("Cut", 5), ended("length")), [None]),
    ],
)
def test_a_message_before_the_last_item_is_commentary(
    events: tuple[AnyEvent, ...], phases: list[str | None]
) -> None:
    record = msgspec.structs.replace(record_of(), rendering=RENDERING)
    assert [item.get("phase") for item in answer_of(record, *events)["output"]] == phases
    assert not any("phase" in item for item in answer_of(record_of(), *events)["output"])
