"""Stores a server's durable state in a folder, and records what another server reads from it."""

import json
import shutil
import signal
import tempfile
from pathlib import Path

from stress.recording.bodies import CASES
from stress.recording.parts import (
    ENDLESS,
    batch,
    messages_batch,
    read_again,
    read_batch,
    read_response,
)
from stress.recording.record import running
from stress.recording.session import Recording, Session

CUT = "cut"


def make_state(code: Path, folder: Path) -> None:
    """Send requests, then kill the server while it writes a stream and a background response."""
    folder.mkdir(parents=True, exist_ok=True)
    recording = Recording(folder / "made.jsonl")
    recording.section("made")
    with running(code, folder / "state") as server:
        session = Session(server.url, recording)
        known: dict[str, list[str]] = {"streams": [], "responses": []}
        for route, (body, _) in CASES.items():
            made = session.post(route, body | {"stream": True}, X_Conversation_Id=f"of {route}")
            known["streams"] += [made.id] if made.status == 200 else []
        body = CASES["/v1/responses"][0] | {"store": True}
        first = session.post("/v1/responses", body).json["id"]
        second = session.post("/v1/responses", body | {"previous_response_id": first}).json["id"]
        _, of_files = batch(session)
        known |= {"batches": [of_files], "messages": [messages_batch(session)]}
        endless = {"ignore_eos": True, "max_output_tokens": 600, "background": True}
        third = session.post("/v1/responses", body | endless).json["id"]
        known["responses"] += [first, second, third]
        session.begin("/v1/completions", ENDLESS, 3000, X_Conversation_Id=CUT)
        server.process.send_signal(signal.SIGKILL)
    recording.close()
    (folder / "known.json").write_text(json.dumps(known))


def read_state(code: Path, folder: Path, path: Path) -> int:
    """Record what a server serves from a copy of the folder; return the number of answers."""
    known = json.loads((folder / "known.json").read_text())
    recording = Recording(path)
    with tempfile.TemporaryDirectory(prefix="recording-") as temporary:
        state = Path(temporary) / "state"
        shutil.copytree(folder / "state", state)
        with running(code, state) as server:
            session = Session(server.url, recording)
            recording.section("state")
            # This request ends when the stream ends.
            whole = session.get(f"/v1/stream?conv_id={CUT}")
            read_again(session, whole.headers["x-stream-id"], CUT, whole.body)
            for id in known["responses"]:
                session.until(
                    f"/v1/responses/{id}",
                    lambda it: it["completed_at"] or it["error"] or it["incomplete_details"],
                )
                read_response(session, id)
            for id in known["streams"]:
                session.get(f"/v1/streams/{id}/events?view=wire")
                session.get(f"/v1/streams/{id}/events")
                session.get(f"/v1/durable/{id}?offset=-1")
            for id in known["batches"]:
                read_batch(session, id)
            for id in known["messages"]:
                session.get(f"/v1/messages/batches/{id}")
                session.get(f"/v1/messages/batches/{id}/results", view="lines")
            for route in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
                session.get(route)
            body = CASES["/v1/responses"][0] | {"previous_response_id": known["responses"][1]}
            session.post("/v1/responses", body, "continued")
            for route, (one, _) in CASES.items():
                session.post(
                    route, one | {"stream": True}, "again", X_Conversation_Id=f"of {route}"
                )
    recording.close()
    return recording.num_answers
