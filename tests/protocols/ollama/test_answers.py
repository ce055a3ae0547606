import json
from typing import Any

import pytest

from headrace.protocols.dialect import WireFrames, dialect_of, encode
from headrace.streams.events import AnyEvent, Heartbeat
from headrace.streams.record import Names, Record
from headrace_common.pieces import REASONING, TOOL
from tests.gateway.builders import ended, error, log_of, make_record, make_request, piece, tokens

HEAD = b'{"model":"headrace-mini","created_at":"2026-09-21T14:13:20.%s",'
CALL = (
    piece("hm", REASONING),
    piece("", TOOL, 0, "add"),
    piece('{"a"', TOOL, 0),
    piece(": 1}", TOOL, 0),
    ended("tool_calls"),
)


def record_of(route: str = "/api/chat", **changes: Any) -> Record:
    return make_record(make_request(route, **changes))


def lines_of(record: Record, *events: AnyEvent) -> list[bytes]:
    frames = WireFrames(record)
    return [line for event in log_of(record, *events) for line in frames.render(event)]


def whole_of(record: Record, *events: AnyEvent) -> Any:
    body = dialect_of(record.request.route).response_body(record)
    for event in log_of(record, *events):
        body.feed(event)
    return json.loads(encode(body.whole()))


def test_a_stream_has_these_bytes() -> None:
    lines = lines_of(record_of(), tokens("Hi", 5, at_ms=7), ended("length", at_ms=12))
    said = b'"message":{"role":"assistant","content":"%s"},"done":%s'
    assert lines[0] == HEAD % b"007Z" + said % (b"Hi", b"false") + b"}\n"
    figures = (
        b',"done_reason":"length","total_duration":12000000,"load_duration":0,'
        b'"prompt_eval_count":2,"prompt_eval_duration":0,"eval_count":1,"eval_duration":12000000}\n'
    )
    assert lines[1:] == [HEAD % b"012Z" + said % (b"", b"true") + figures]


def test_generate_puts_its_text_in_another_field() -> None:
    lines = lines_of(record_of("/api/generate"), piece("hm", REASONING), tokens("Hi", 5), ended())
    thought, said, last = map(json.loads, lines)
    assert (thought["thinking"], thought["response"]) == ("hm", "")
    assert said["response"] == "Hi" and (last["response"], last["done"]) == ("", True)
    whole = whole_of(record_of("/api/generate"), piece("hm", REASONING), tokens("Hi", 5), ended())
    assert whole == last | {"response": "Hi", "thinking": "hm"}


def test_a_call_is_one_line_with_an_object_as_arguments() -> None:
    thought, called, last = (json.loads(line) for line in lines_of(record_of(), *CALL))
    assert thought["message"]["thinking"] == "hm"
    (call,) = called["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "add", "arguments": {"a": 1}}
    assert last["done_reason"] == "stop" and "tool_calls" not in last["message"]
    message = whole_of(record_of(), *CALL)["message"]
    assert message["tool_calls"] == [call] and message["thinking"] == "hm"


@pytest.mark.parametrize("form", ["data", "comment"])
def test_every_heartbeat_is_a_line_without_content(form: str) -> None:
    lines = lines_of(
        record_of(), Heartbeat(seq=0, at_ms=3, state="queued", form=form), tokens("Hi", 5), ended()
    )
    sign = json.loads(lines[0])
    assert (sign["message"]["content"], sign["done"]) == ("", False)
    assert json.loads(WireFrames(record_of()).idle(form))["message"]["content"] == ""


def test_a_stream_that_was_cut_ends_with_an_error_instead_of_done() -> None:
    *_, last = lines_of(record_of(), tokens("Hi", 5), error())
    assert json.loads(last) == {
        "error": "The engine stopped and could not be restarted.",
        "code": "engine_failed",
    }


def test_lines_of_a_resumable_stream_carry_its_id_and_offset() -> None:
    record = record_of()
    named = Record(**{f: getattr(record, f) for f in record.__struct_fields__ if f != "names"},
                   names=Names(conversation="c"))  # fmt: skip
    events = (tokens("Hi", 5), ended())
    for number, (line, plain) in enumerate(
        zip(lines_of(named, *events), lines_of(record, *events), strict=True)
    ):
        read = json.loads(line)
        assert read.pop("id") == f"{record.id}:{(1, 3)[number]}" and read == json.loads(plain)
