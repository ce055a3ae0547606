"""Tests that a batch survives kills of its engine and server with one correct answer per line.

`make test-batches` runs 10,000 lines over 20 kills, which LINES and KILLS set.
"""

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.batch_lines import answers_alone, chat_line, in_lines, results
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess

LINES, KILLS = int(os.environ.get("LINES", "80")), int(os.environ.get("KILLS", "4"))
WITHIN_S = 60 + LINES
NUM_ASKING = 4


class KilledServer:
    """A server that is restarted on the same state directory after each kill."""

    def __init__(self, state: Path) -> None:
        self._flags = ("--threads", "1", "--state-dir", str(state), "--drain-s", "1")
        self.running = ServerProcess(*self._flags).wait_until_ready()
        self.client = openai.OpenAI(base_url=f"{self.running.url}/v1", api_key="-")

    def kill(self, number: int) -> None:
        """Kill the engine if `number` is odd, or else the server, and restart it."""
        if number % 2:
            self.running.kill_engine()
            return
        self.running.stop(signal.SIGKILL)
        self.running = ServerProcess(*self._flags).wait_until_ready()
        self.client = openai.OpenAI(base_url=f"{self.running.url}/v1", api_key="-")


@pytest.mark.slow
def test_after_kills_each_batch_line_has_one_answer_equal_to_a_single_request(
    tmp_path: Path,
) -> None:
    lines = [chat_line(n, temperature=0.8, seed=n, max_tokens=24) for n in range(LINES)]
    server = KilledServer(tmp_path / "state")
    try:
        client = server.client
        file = client.files.create(file=("lines.jsonl", in_lines(lines)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        began = time.monotonic()
        for number in range(KILLS):
            due = LINES * number // (KILLS + 1)
            eventually(lambda due=due: done(server, batch.id) >= due, WITHIN_S)
            server.kill(number)
        eventually(lambda: ended(server, batch.id), WITHIN_S)
        print(f"{LINES} lines over {KILLS} kills: {time.monotonic() - began:.0f} s")
        batch = server.client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.request_counts.completed == LINES
        found = results(server.client.files.content(batch.output_file_id).content)
        times = Counter(it["custom_id"] for it in found)
        assert times == dict.fromkeys((it["custom_id"] for it in lines), 1)
        texts = {
            it["custom_id"]: it["response"]["body"]["choices"][0]["message"]["content"]
            for it in found
        }
        assert texts == alone(server, lines)
    finally:
        server.running.stop()


def done(server: KilledServer, id: str) -> int:
    time.sleep(0.05)
    return server.client.batches.retrieve(id).request_counts.completed


def ended(server: KilledServer, id: str) -> bool:
    time.sleep(0.05)
    return server.client.batches.retrieve(id).status == "completed"


def alone(server: KilledServer, lines: list[dict[str, Any]]) -> dict[str, str | None]:
    """Return the answers to the same requests without a batch."""
    shares = [lines[start::NUM_ASKING] for start in range(NUM_ASKING)]
    with ThreadPoolExecutor(NUM_ASKING) as threads:
        found = threads.map(lambda share: answers_alone(server.client, share), shares)
        return {id: text for share in found for id, text in share.items()}
