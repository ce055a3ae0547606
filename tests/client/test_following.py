"""The rules of following a stream, without a socket."""

import json
from typing import Any

import pytest

from headrace import ConfigError, Refused, StreamFailed, Unreachable
from headrace.client.events import AnyEvent, EventReader, Heartbeat, Tokens, Update
from headrace.client.following import NextAction, StreamFollower, new_request
from headrace.client.http import to_address
from tests.client.builders import HEARTBEAT, STREAM, accepted, event, finish, tokens

CHAT = [{"role": "user", "content": "hi"}]


def open_stream(patience_s: float = 60.0) -> StreamFollower:
    following = StreamFollower(new_request({"messages": CHAT}), "", -1, patience_s)
    following.request()
    assert following.answered(200, {"x-stream-id": STREAM}) is NextAction.LEAVE
    return following


def take(following: StreamFollower, data: bytes) -> list[AnyEvent]:
    taken: list[Update] = []
    for one in following.feed(data):
        taken.append(one)
        following.applied(one)
    return [one for one in taken if not isinstance(one, Heartbeat)]


def pauses(following: StreamFollower, count: int) -> list[float]:
    found = []
    for _ in range(count):
        following.broke(True, "cut")
        found.append(following.pause_s)
    return found


def test_the_request_is_sent_again_with_its_key_when_its_answer_was_lost() -> None:
    following = StreamFollower(new_request({"messages": CHAT}), "", -1, 60)
    first = following.request()
    following.broke(True, "reset")
    assert following.request() == first
    assert len(first.headers["Idempotency-Key"]) == 32


def test_two_requests_have_two_keys() -> None:
    keys = [new_request({"prompt": "a"}).headers["Idempotency-Key"] for _ in range(2)]
    assert keys[0] != keys[1]


def test_once_admitted_its_events_are_asked_for_behind_the_cursor() -> None:
    following = open_stream()
    asked = following.request()
    assert (asked.method, asked.path) == ("GET", f"/v1/streams/{STREAM}/events")
    assert "Last-Event-ID" not in asked.headers
    take(following, accepted() + tokens(1, "a"))
    assert following.request().headers["Last-Event-ID"] == f"{STREAM}:1"


def test_the_cursor_moves_only_once_an_event_was_applied() -> None:
    following = open_stream()
    coming = following.feed(accepted() + tokens(1, "a"))
    following.applied(next(coming))
    next(coming)
    assert following.cursor == 0


def test_no_event_comes_twice() -> None:
    following = open_stream()
    take(following, accepted() + tokens(1, "a"))
    following.request()
    again = take(following, tokens(1, "a") + tokens(2, "b"))
    assert [one.seq for one in again] == [2]


def test_the_news_that_the_engine_died_is_given_on_and_moves_the_cursor() -> None:
    following = open_stream()
    take(following, accepted())
    died = event(1, "heartbeat", state="recovering", form="data", attempt=1)
    (heard,) = following.feed(died)
    following.applied(heard)
    assert heard == Heartbeat("recovering", attempt=1, seq=1)
    assert following.cursor == 1 and not list(following.feed(died))


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_events_may_come_in_any_pieces(size: int) -> None:
    data = HEARTBEAT + accepted() + b": ping\n" + tokens(1, "ä\n\nb") + finish(2)
    reader = EventReader()
    found = [e for i in range(0, len(data), size) for e in reader.feed(data[i : i + size])]
    beat, *events = found
    assert beat == Heartbeat("queued")
    assert [e.seq for e in events if not isinstance(e, Heartbeat)] == [0, 1, 2]
    assert isinstance(events[1], Tokens) and events[1].pieces[0].text == "ä\n\nb"


def test_kinds_of_a_later_server_are_passed_over() -> None:
    assert list(EventReader().feed(event(4, "surprise", much=1))) == []


def test_half_an_event_at_a_cut_is_forgotten() -> None:
    following = open_stream()
    take(following, accepted() + tokens(1, "a")[:20])
    following.request()
    assert [one.seq for one in take(following, tokens(1, "a"))] == [1]


def test_pauses_double_from_a_quarter_to_five_seconds_until_something_comes() -> None:
    following = open_stream()
    assert pauses(following, 6) == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    take(following, accepted())
    assert following.pause_s == 0
    assert pauses(following, 1) == [0.25]


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_what_mends_itself_is_waited_for_as_long_as_the_server_says(status: int) -> None:
    following = open_stream()
    assert following.answered(status, {}) is NextAction.REFUSED
    following.refused(status, {"retry-after-ms": "1500"}, b"{}")
    assert following.pause_s == 1.5


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500])
def test_everything_else_is_refused_with_its_code(status: int) -> None:
    body = json.dumps({"error": {"message": "No.", "code": "why", "param": "n"}}).encode()
    with pytest.raises(Refused) as refused:
        open_stream().refused(status, {}, body)
    assert (refused.value.status, refused.value.code, refused.value.param) == (status, "why", "n")


def test_patience_ends() -> None:
    following = open_stream(patience_s=3.0)
    with pytest.raises(Unreachable, match="3 s"):
        pauses(following, 9)


def test_a_heartbeat_shows_that_the_server_is_there_however_often_the_connection_is_cut() -> None:
    following = open_stream(patience_s=3.0)
    for _ in range(20):
        assert pauses(following, 2) == [0.25, 0.5]
        take(following, HEARTBEAT)


def test_a_server_that_never_answered_is_not_waited_for() -> None:
    following = StreamFollower(new_request({"messages": CHAT}), "", -1, 60)
    following.request()
    with pytest.raises(Unreachable, match="No server answers"):
        following.broke(False, "refused")


def test_a_finish_ends_it_and_so_does_a_204() -> None:
    finished, behind = open_stream(), open_stream()
    take(finished, accepted() + finish(1))
    assert behind.answered(204, {}) is NextAction.LEAVE
    assert finished.has_ended and behind.has_ended


def test_a_stream_that_others_cut_has_failed() -> None:
    following = open_stream()
    cut: dict[str, Any] = {"code": "replaced", "message": "Replaced.", "type": "", "status": 400}
    with pytest.raises(StreamFailed, match=r"Replaced\."):
        take(following, accepted() + event(1, "error", **cut, retryable=False))
    assert following.has_ended


def test_a_stop_is_sent_until_it_is_heard_and_not_after_the_end() -> None:
    following = open_stream()
    for status in (502, 503, 200):
        asked = following.stop_request()
        assert asked and asked.path == f"/v1/streams/{STREAM}/cancel"
        following.stop_answered(status, {})
    assert following.stop_request() is None
    ended = open_stream()
    take(ended, accepted() + finish(1))
    assert ended.stop_request() is None


def test_a_stop_before_the_first_answer_finds_the_stream_by_its_key() -> None:
    following = StreamFollower(new_request({"messages": CHAT}), "", -1, 60)
    assert following.stop_request() is None  # nothing was sent
    first = following.request()
    assert following.stop_request() == first
    following.stop_answered(200, {"x-stream-id": STREAM})
    cancel = following.stop_request()
    assert cancel and cancel.path.endswith("/cancel")


def test_messages_are_a_chat_and_a_prompt_is_none() -> None:
    assert new_request({"messages": CHAT}).path == "/v1/chat/completions"
    assert new_request({"prompt": "a"}).path == "/v1/completions"


def test_a_heartbeat_that_tells_of_a_recovery_moves_no_cursor() -> None:
    beat = b'event: heartbeat\ndata: {"kind":"heartbeat","state":"recovering","attempt":2}\n\n'
    following = open_stream()
    (told,) = following.feed(beat)
    following.applied(told)
    assert told == Heartbeat("recovering", 2) and following.cursor == -1


def test_fields_that_the_server_ignored_are_refused_and_the_stream_is_ours_to_stop() -> None:
    following = StreamFollower(new_request({"messages": CHAT}), "", -1, 60)
    following.request()
    headers = {"x-stream-id": STREAM, "x-headrace-ignored": "max_token, colour"}
    with pytest.raises(Refused, match="max_token, colour") as refused:
        following.answered(200, headers)
    assert refused.value.param == "max_token"
    assert following.stop_request()


def test_what_takes_connections_and_never_answers_is_not_waited_for_long() -> None:
    following = StreamFollower(new_request({"messages": CHAT}), "", -1, 60)
    with pytest.raises(Unreachable, match="not Headrace"):
        pauses(following, 9)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("localhost:8000", "http://localhost:8000"),
        (" https://one.example/ ", "https://one.example"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("[::1]:8000/under/v1", "http://[::1]:8000/under"),
    ],
)
def test_an_address_needs_no_scheme_and_may_end_as_others_want_it(given: str, meant: str) -> None:
    assert to_address(given) == meant


@pytest.mark.parametrize(
    "url", ["", "8000", ":8000", "ftp://a", "http://", "http:/a", "a b", "a:x", "[::1"]
)
def test_what_cannot_be_an_address_is_said_to_be_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a server's address.*http://127"):
        to_address(url)


def loading_stream() -> StreamFollower:
    following = StreamFollower(new_request({"messages": CHAT}), "", -1, 60)
    following.request()
    assert following.answered(200, {"x-headrace-loading": "true"}) is NextAction.READ
    return following


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_whose_model_is_loaded_is_named_by_its_first_frame_with_an_id(size: int) -> None:
    following = loading_stream()
    sent = b': loading the model\ndata: {"choices":[]}\n\n'
    assert list(following.feed(sent)) == [Heartbeat("loading")] and not following.can_leave
    named = f'id: {STREAM}:0\ndata: {{"choices":[]}}\n\n'.encode()
    for start in range(0, len(named), size):
        assert not list(following.feed(named[start : start + size]))
    assert following.can_leave
    assert following.request().path == f"/v1/streams/{STREAM}/events"
    assert not following.can_leave


def test_a_load_that_fails_is_told_and_one_that_was_cut_is_asked_for_again() -> None:
    error = b'data: {"error":{"code":"%s","message":"no"}}\n\n'
    with pytest.raises(Refused) as refused:
        list(loading_stream().feed(error % b"load_failed"))
    assert refused.value.code == "load_failed"
    following = loading_stream()
    assert not list(following.feed(error % b"server_shutdown"))
    assert following.pause_s == 0.25 and following.request().method == "POST"
