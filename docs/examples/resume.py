"""Streams an answer over HTTP and survives any loss of the connection, server restarts included.

    python docs/examples/resume.py http://127.0.0.1:8000 "Count from 1 to 20."

The request goes out under a key of its own, so it can be sent again. From its first answer on the
stream is read by its id, behind the last event that was shown. Needs httpx.
"""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Iterator

import httpx

TERMINAL = ("finish", "error")


def events(response: httpx.Response) -> Iterator[tuple[str, str, dict]]:
    """Kind, id and data of each server-sent event; heartbeats have no id."""
    fields = {"event": "", "id": "", "data": ""}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields["data"]:
            yield fields["event"], fields["id"], json.loads(fields["data"])
            fields = dict.fromkeys(fields, "")


def show(kind: str, event: dict) -> None:
    if kind == "queued":
        print(f"[number {event['position']} of {event['waiting']} that wait]", file=sys.stderr)
    elif kind == "progress":
        print(f"[{event['processed']} of {event['total']} prompt tokens]", file=sys.stderr)
    elif kind == "tokens":
        print("".join(piece["text"] for piece in event.get("pieces", ())), end="", flush=True)
    elif kind == "error":
        raise SystemExit(f"\n{event['code']}: {event['message']}")


def main(url: str, prompt: str) -> None:
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True}
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    stream, cursor, kind, pause = "", "", "", 0.25
    with httpx.Client(base_url=url, timeout=30) as client:
        while kind not in TERMINAL:
            try:
                if not stream:  # again, as often as it takes: the key makes it one request
                    with client.stream(
                        "POST", "/v1/chat/completions", json=body, headers=headers
                    ) as response:
                        if response.status_code in (429, 503):
                            time.sleep(int(response.headers["retry-after-ms"]) / 1000)
                            continue
                        response.raise_for_status()
                        stream = response.headers.get("X-Stream-Id", "")
                        if not stream:  # while a model is loaded; then frames have ids
                            stream = next(id for _, id, _ in events(response) if id).split(":")[0]
                path = f"/v1/streams/{stream}/events"
                behind = {"Last-Event-ID": cursor} if cursor else {}
                with client.stream("GET", path, headers=behind) as response:
                    response.raise_for_status()
                    for kind, id, event in events(response):
                        show(kind, event)
                        cursor, pause = id or cursor, 0.25  # first shown, then remembered
            except httpx.TransportError:
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stream an answer that survives lost connections.")
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("prompt")
    arguments = parser.parse_args()
    main(arguments.url, arguments.prompt)
