"""The calls that llama.cpp's own page makes on the stream routes, in its order."""

from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.servers import running_server
from tools.harness.sse import data_in

ID = "c1f3::headrace/tiny"
BODY = {
    "messages": [{"role": "user", "content": "Hello"}],
    "stream": True,
    "return_progress": True,
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
}


def lookup(url: str) -> list[dict[str, object]]:
    found = httpx.post(f"{url}/v1/streams/lookup", json={"conversation_ids": ["c1f3"]})
    entries: list[dict[str, object]] = found.json()
    return entries


def test_start_lose_the_line_find_resume_at_a_line_end_and_forget(folder: Path) -> None:
    with running_server(str(folder), "--threads", "1") as server:
        url = server.url
        headers = {"X-Conversation-Id": ID}
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=BODY, headers=headers
        ) as answer:
            got = b"".join(piece for piece, _ in zip(answer.iter_raw(), range(6), strict=False))
        offset = got.rfind(b"\n") + 1  # the page keeps whole lines only
        assert lookup(url)[0]["conversation_id"] == ID
        params = {"conv_id": ID, "from": offset}
        rest = httpx.get(f"{url}/v1/stream", params=params, timeout=60).content
        eventually(lambda: lookup(url)[0]["is_done"] is True)
        whole = got[:offset] + rest
        chunks = data_in(whole)
        progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert progress[-1]["processed"] == progress[-1]["total"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert whole.endswith(b"data: [DONE]\n\n")
        assert httpx.delete(f"{url}/v1/stream", params={"conv_id": ID}).status_code == 204
        assert lookup(url) == []
        assert httpx.get(f"{url}/v1/stream", params=params).status_code == 404
