"""Asks several questions at once over one WebSocket, and shows each answer as it ends.

    python docs/examples/realtime.py http://127.0.0.1:8000 "Count to 5." "Spell cat."

Needs websockets.
"""

import argparse
import asyncio
import json

from websockets.asyncio.client import connect


async def main(url: str, *prompts: str) -> None:
    texts = dict.fromkeys(prompts, "")
    address = url.replace("http", "ws", 1) + "/v1/realtime-text"
    async with connect(address) as socket:  # a key goes into additional_headers
        for prompt in texts:
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
            request = {"type": "request", "id": prompt, "route": "/v1/chat/completions"}
            await socket.send(json.dumps({**request, "body": body}))
        num_open = len(texts)
        while num_open:
            message = json.loads(await socket.recv())
            event = message.get("event", {})
            if message["type"] == "error" or event.get("kind") == "error":
                raise SystemExit(message)
            if event.get("kind") == "tokens":
                texts[message["id"]] += "".join(p["text"] for p in event.get("pieces", ()))
            elif event.get("kind") == "finish":
                num_open -= 1
                print(f"{message['id']} -> {texts[message['id']]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask several questions over one WebSocket.")
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, *arguments.prompts))
