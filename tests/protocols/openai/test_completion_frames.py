import json
from typing import Any

from headrace.protocols.dialect import encode
from headrace.protocols.openai import completions as openai_completions
from headrace.streams.events import AnyEvent, TokenLogprob
from headrace.streams.record import Record
from headrace_common.request import Text
from tests.gateway.builders import ended, log_of, logprob, make_record, make_request, tokens

HEAD = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1790000000,"model":"headrace-mini","system_fingerprint":"fp_3c1d5e8f9a02",'
    b'"choices":[{"index":0,'
)


def record_of(**changes: Any) -> Record:
    return make_record(make_request("/v1/completions", **changes))


def frames_of(record: Record, *events: AnyEvent) -> list[bytes]:
    frames = openai_completions.frames(record)
    return [frame for event in log_of(record, *events) for frame in frames.render(event)]


def answer_of(record: Record, *events: AnyEvent) -> Any:
    answer = openai_completions.response_body(record)
    for event in log_of(record, *events):
        answer.feed(event)
    return json.loads(encode(answer.whole()))


def logprobs_of(*events: AnyEvent) -> Any:
    """Join the log probabilities of a stream; assert that the whole answer has the same."""
    record = record_of(num_logprobs=1)
    joined: dict[str, list[Any]] = {}
    for frame in frames_of(record, *events)[:-1]:
        for name, values in (json.loads(frame[6:])["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert answer_of(record, *events)["choices"][0]["logprobs"] == joined
    return joined


def test_a_stream_has_these_bytes() -> None:
    frames = frames_of(record_of(), tokens("Hi", 5), ended("length"))
    assert frames[0] == HEAD + b'"text":"","logprobs":null,"finish_reason":null}]}\n\n'
    assert frames[1] == HEAD + b'"text":"Hi","logprobs":null,"finish_reason":null}]}\n\n'
    end = b'"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}],"timings":{'
    assert frames[2].startswith(HEAD + end)
    assert frames[3:] == [b"data: [DONE]\n\n"]


def test_a_heartbeat_is_the_first_frame_again() -> None:
    assert openai_completions.frames(record_of()).idle() == frames_of(record_of())[0]


def test_without_heartbeats_text_is_the_first_frame() -> None:
    frames = frames_of(record_of(response_options={"heartbeat": False}), tokens("Hi", 5), ended())
    assert b'"text":"Hi"' in frames[0]


def test_a_whole_answer_has_these_keys_in_this_order() -> None:
    answer = answer_of(record_of(), tokens("Hi", 5), ended())
    assert list(answer) == [
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage", "timings"),
    ]
    assert list(answer["choices"][0].items()) == [
        ("index", 0),
        ("text", "Hi"),
        ("logprobs", None),
        ("finish_reason", "stop"),
        ("stop_reason", None),
    ]


def test_a_zero_token_completion_answers() -> None:
    answer = answer_of(record_of(), ended("length"))
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 0


def test_a_list_has_its_choices_by_prompt_and_then_by_number() -> None:
    record = record_of(
        prompts=(Text("a"), Text("b")), n=2, response_options={"return_token_ids": True}
    )
    events = [tokens("x", i, choice=i) for i in range(4)] + [ended(choice=i) for i in range(4)]
    choices = answer_of(record, *events)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(choice["prompt_token_ids"] == [104, 105] for choice in choices)
    frames = [json.loads(frame[6:]) for frame in frames_of(record, *events)[1:-1]]
    assert ["prompt_token_ids" in f["choices"][0] for f in frames] == [True] * 4 + [False] * 4


def test_log_probabilities_are_parallel_lists() -> None:
    entry = logprob("Hi", -0.5, logprob("Ho", -0.25))
    assert logprobs_of(tokens("Hi", 5, logprobs=(entry,)), ended()) == {
        "tokens": ["Hi"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"Ho": -0.25, "Hi": -0.5}],
        "text_offset": [0],
    }


def split(text: str) -> tuple[TokenLogprob, ...]:
    return tuple(logprob(bytes([byte])) for byte in text.encode())


def test_a_token_of_partial_bytes_is_written_as_bytes() -> None:
    shown = logprobs_of(tokens("é", 1, 2, logprobs=split("é")), ended())
    assert shown["tokens"] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert shown["text_offset"] == [0, 0]


def test_offsets_count_code_points() -> None:
    events = (
        tokens("a\N{GRINNING FACE}", 1, 2, 3, 4, 5, logprobs=split("a\N{GRINNING FACE}")),
        tokens("bc", 6, 7, logprobs=(logprob("b"), logprob("c"))),
    )
    assert logprobs_of(*events, ended())["text_offset"] == [0, 1, 1, 1, 1, 2, 3]


def test_offsets_count_broken_bytes_as_the_text_shows_them() -> None:
    broken = (b"a", b"\x82", b"\xf0\x9f", b"b", b"\xc3", b"\xc3", b"\xa9")
    text = b"".join(broken).decode(errors="replace")
    entries = tuple(logprob(raw) for raw in broken)
    assert logprobs_of(tokens(text, 1, logprobs=entries), ended())["text_offset"] == [
        *(0, 1, 2, 3, 4, 5, 5),
    ]


def test_echo_starts_with_null() -> None:
    prompt = (logprob("p", None), logprob("q", -1.0))
    events = (tokens("pq", logprobs=prompt), tokens("r", 1, logprobs=(logprob("r"),)), ended())
    shown = logprobs_of(*events)
    assert shown["token_logprobs"] == [None, -1.0, -0.5]
    assert shown["top_logprobs"] == [None, {"q": -1.0}, {"r": -0.5}]
    assert shown["text_offset"] == [0, 1, 2]


def test_a_hidden_special_token_does_not_shift_later_offsets() -> None:
    prompt = (logprob("<s>", None), logprob("p"))
    events = (tokens("p", logprobs=prompt), tokens("r", 1, logprobs=(logprob("r"),)), ended())
    assert logprobs_of(*events)["text_offset"][-1] == 1
