"""Records streams that are read again, stored responses, WebSockets and batches."""

import json
from typing import Any

from stress.recording.bodies import CASES, LONG, MODEL, user
from stress.recording.session import Session

_ENDED = ("completed", "failed", "expired", "cancelled", "ended", "incomplete")
_FORM = {"Content-Type": "multipart/form-data; boundary=part"}
ENDLESS = {"prompt": LONG, "max_tokens": 600, "temperature": 0, "ignore_eos": True, "stream": True}
# fmt: off
_EVENTS = (
    "", "?after=2", "?after=999", "?after=x", "?view=wire", "?view=wire&after=2", "?view=x",
    "?limit=2", "?wait=0",
)
_OFFSETS = (
    "", "?offset=-1", "?offset=now", "?offset=0000000000000003", "?offset=x",
    "?offset=-1&live=sse", "?live=sse", "?offset=now&live=long-poll",
)
_STARTS = (
    "", "?stream=true", "?stream=true&starting_after=3", "?stream=true&starting_after=999",
    "?stream=x", "?starting_after=x",
)
_ITEMS = ("", "?order=asc", "?order=desc&limit=1", "?limit=0", "?order=x", "?after=x")
_MESSAGES: tuple[Any, ...] = (
    {}, [], "{", b"\x00", {"type": "x", "id": "a"}, {"type": "request"},
    {"type": "request", "id": "a" * 200}, {"type": "attach", "id": "a", "stream": "none"},
    {"type": "request", "id": "a", "route": "/v1/none", "body": {}},
)
_WRONG_BATCHES = ({"endpoint": "/v1/none"}, {"completion_window": "1h"}, {"input_file_id": "none"})
# fmt: on


def streams(session: Session) -> None:
    """Read streams again: by event, by byte, as Durable Streams, and from several positions."""
    for route, (body, _) in CASES.items():
        name = f"of {route}"
        made = session.post(route, body | {"stream": True}, "named", X_Conversation_Id=name)
        if made.status == 200:
            read_again(session, made.id, name, made.body)
    body = CASES["/v1/completions"][0]
    for changes in ({}, {}, {"stream": True}, {"max_tokens": 3}):
        session.post("/v1/completions", body | changes, "with a key", Idempotency_Key="key")
    got = session.begin("/v1/completions", ENDLESS, 3000, X_Conversation_Id="left")
    id = got.partition(b'"id":"')[2].partition(b'"')[0].decode()
    session.post("/v1/streams/lookup", {"conversation_ids": ["left", "of /api/chat"]}, "known")
    session.ask("POST", f"/v1/streams/{id}/cancel", view="shape")
    session.until(f"/v1/streams/{id}", lambda it: it["state"] != "running")
    session.ask("DELETE", f"/v1/streams/{id}")
    session.get(f"/v1/streams/{id}", "deleted")
    session.ask("DELETE", "/v1/stream?conv_id=of%20/completion")
    session.get("/v1/stream?conv_id=of%20/completion", "deleted")
    session.ask("DELETE", "/v1/stream")


def read_again(session: Session, id: str, name: str, body: bytes) -> None:
    """Read a stream from its start, its middle, its end, and from positions that do not exist."""
    events = f"/v1/streams/{id}/events"
    session.get(f"/v1/streams/{id}")
    session.ask("HEAD", f"/v1/streams/{id}")
    for query in _EVENTS:
        session.get(events + query)
        session.get(events + query, "as a page", Accept="application/json")
    for cursor in (f"{id}:0", f"{id}:3", f"{id}:3.1", f"{id}:999", "other:1", "x"):
        session.get(events, "behind an event", Last_Event_ID=cursor)
        session.get(f"{events}?view=wire", "behind a frame", Last_Event_ID=cursor)
    mark = b"\n\n" if b"\n\n" in body else b"\n"
    end = body.find(mark) + len(mark)
    for start in (0, end, end + 1, end + 3, 1 << 20, -1, "x"):
        session.get(f"/v1/stream?conv_id={name.replace(' ', '%20')}&from={start}")
    session.get(f"/v1/stream/{name.replace(' ', '%20')}")
    session.get(f"/v1/stream?conv_id={name.replace(' ', '%20')}&stream_id={id}")
    session.get(f"/v1/stream?conv_id={name.replace(' ', '%20')}&stream_id=other")
    for query in _OFFSETS:
        session.get(f"/v1/durable/{id}{query}", view="whole")
    session.ask("HEAD", f"/v1/durable/{id}")


def responses(session: Session) -> None:
    """Store responses, continue them, read them in several ways, and stop and delete them."""
    body: dict[str, Any] = CASES["/v1/responses"][0] | {"store": True}
    first = session.post("/v1/responses", body | {"metadata": {"a": "b"}}, "first").json["id"]
    chained = {"input": "And from 6 to 9?", "previous_response_id": first}
    second = session.post("/v1/responses", body | chained, "second").json["id"]
    third = session.post("/v1/responses", body | chained | {"stream": True}, "streamed").id
    later = session.post("/v1/responses", body | {"background": True}, "later").json["id"]
    session.until(f"/v1/responses/{later}", lambda it: it["status"] in _ENDED)
    for id in (first, second, third, later):
        read_response(session, id)
    endless = {"input": LONG, "ignore_eos": True, "max_output_tokens": 600, "background": True}
    stopped = session.post("/v1/responses", body | endless, "to be stopped").json["id"]
    session.fetch("POST", f"/v1/responses/{stopped}/cancel")
    session.until(f"/v1/responses/{stopped}", lambda it: it["status"] in _ENDED)
    session.ask("POST", f"/v1/responses/{first}/cancel")
    session.ask("POST", "/v1/responses/resp_unknown/cancel")
    for id in (first, "resp_unknown"):
        session.ask("DELETE", f"/v1/responses/{id}")
    session.get(f"/v1/responses/{first}", "deleted")
    session.post("/v1/responses", body | chained, "of a deleted one")
    item = {"type": "item_reference", "id": "msg_unknown"}
    session.post("/v1/responses", body | {"input": [item]}, "of an unknown item")


def read_response(session: Session, id: str) -> None:
    path = f"/v1/responses/{id}"
    for query in _STARTS:
        session.get(path + query)
    for query in _ITEMS:
        session.get(f"{path}/input_items{query}")


def sockets(session: Session) -> None:
    for route, (body, _) in CASES.items():
        request = {"type": "request", "id": "a", "route": route, "body": body}
        session.talk(f"socket {route}", request)
        session.talk(f"socket {route} wrong", request | {"body": {"stream": 7}})
    body = CASES["/v1/completions"][0]
    named = {"type": "request", "id": "a", "route": "/v1/completions", "body": body}
    named |= {"conversation_id": "on a socket", "idempotency_key": "on a socket"}
    session.talk("socket, named", named)
    session.talk("socket, named again", named)
    made = session.post("/v1/completions", body, "to attach", X_Conversation_Id="s")
    for after in (-1, 2, 999, "x"):
        attach = {"type": "attach", "id": "a", "stream": made.id, "after": after}
        session.talk(f"socket attached {after}", attach)
    for message in _MESSAGES:
        session.talk(f"socket sent {message!r}", message)
    session.talk("socket on another path", path="/v1/responses")
    session.talk("socket of a page", {}, Origin="https://evil.example")


def _form(purpose: str, data: bytes) -> bytes:
    field = b'--part\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    head = b'--part\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return field + purpose.encode() + b"\r\n" + head + data + b"\r\n--part--\r\n"


def batch(session: Session, *more: dict[str, Any]) -> tuple[str, str]:
    """Process a batch file in which one prompt is too long; return the ids of file and batch."""
    fields = {"model": MODEL, "max_tokens": 9, "temperature": 0}
    wishes = [fields | {"messages": user(f"What is {number} + 5?")} for number in range(4)]
    wishes += [fields | {"messages": user(LONG * 6)}, *more]
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/chat/completions", "body": it}
        for n, it in enumerate(wishes)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = session.ask("POST", "/v1/files", _form("batch", data), "", _FORM).json["id"]
    body = {"endpoint": "/v1/chat/completions", "input_file_id": file, "completion_window": "24h"}
    made = session.post("/v1/batches", body | {"metadata": {"a": "b"}}).json["id"]
    session.until(f"/v1/batches/{made}", lambda it: it["status"] in _ENDED)
    return file, made


def read_batch(session: Session, id: str) -> None:
    shown = session.get(f"/v1/batches/{id}").json
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        session.get(f"/v1/files/{shown[name]}", name)
        session.get(f"/v1/files/{shown[name]}/content", name, "lines")


def messages_batch(session: Session) -> str:
    fields = {"model": MODEL, "max_tokens": 9, "temperature": 0}
    requests = [
        {"custom_id": f"m-{n}", "params": fields | {"messages": user(f"What is {n} + 7?")}}
        for n in range(3)
    ]
    unknown = fields | {"messages": user("a"), "model": "no-such-model"}
    requests.append({"custom_id": "wrong", "params": unknown})
    made = str(session.post("/v1/messages/batches", {"requests": requests}).json["id"])
    session.until(f"/v1/messages/batches/{made}", lambda it: it["processing_status"] == "ended")
    return made


def batches(session: Session) -> None:
    file, made = batch(session)
    read_batch(session, made)
    for query in ("", "?limit=1", "?limit=x", "?order=asc", "?purpose=batch", "?after=x"):
        # The order of the files is random.
        if "limit=1" not in query:
            session.get(f"/v1/files{query}", "listed", "entries")
        session.get(f"/v1/batches{query}", "listed")
        session.get(f"/v1/messages/batches{query}", "listed")
    session.ask("POST", f"/v1/batches/{made}/cancel")
    read_batch(session, batch(session, {"messages": []}, {"model": "no-such-model"})[1])
    of_messages = messages_batch(session)
    session.get(f"/v1/messages/batches/{of_messages}")
    session.get(f"/v1/messages/batches/{of_messages}/results", view="lines")
    session.ask("POST", f"/v1/messages/batches/{of_messages}/cancel")
    session.ask("DELETE", f"/v1/messages/batches/{of_messages}")
    session.get(f"/v1/messages/batches/{of_messages}/results", "deleted")
    session.ask("DELETE", f"/v1/files/{file}")
    session.get(f"/v1/files/{file}/content", "deleted")
    for body in (_form("x", b"a"), _form("batch", b""), b"", b"--part--\r\n"):
        session.ask("POST", "/v1/files", body, "wrong", _FORM)
    for changes in _WRONG_BATCHES:
        known = {"endpoint": "/v1/embeddings", "input_file_id": file, "completion_window": "24h"}
        session.post("/v1/batches", known | changes, "wrong")
    for requests in ([], [{}], [{"custom_id": "a", "params": {}}] * 2):
        session.post("/v1/messages/batches", {"requests": requests}, "wrong")
