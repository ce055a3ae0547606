"""Tests of batches on several servers that share one Redis."""

import signal
import time
from collections import Counter
from pathlib import Path

import openai
import pytest

from tests.e2e.batch_lines import answers_alone, chat_line, in_lines, results
from tools.harness.eventually import eventually
from tools.harness.redis_servers import RedisServer, needs_redis
from tools.harness.servers import ServerProcess

NUM_LINES = 60


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=5)


@needs_redis
@pytest.mark.slow
def test_another_server_completes_the_batch_of_a_killed_server(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis", "--appendonly", "yes")
    flags = ("--threads", "1", "--state-dir", redis.url)
    servers = [ServerProcess(*flags).wait_until_ready() for _ in range(2)]
    try:
        first, second = map(client_of, servers)
        lines = [chat_line(number, max_tokens=60, ignore_eos=True) for number in range(NUM_LINES)]
        file = first.files.create(file=("lines.jsonl", in_lines(lines)), purpose="batch")
        batch = second.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def done() -> int:
            time.sleep(0.1)
            return second.batches.retrieve(batch.id).request_counts.completed

        eventually(lambda: done() >= 5, 120)
        servers[0].stop(signal.SIGKILL)
        eventually(lambda: done() == NUM_LINES, 120)
        eventually(lambda: second.batches.retrieve(batch.id).status == "completed", 60)
        batch = second.batches.retrieve(batch.id)
        found = results(second.files.content(batch.output_file_id).content)
        assert Counter(it["custom_id"] for it in found) == {it["custom_id"]: 1 for it in lines}
        texts = {
            it["custom_id"]: it["response"]["body"]["choices"][0]["message"]["content"]
            for it in found
        }
        assert texts == answers_alone(second, lines)
    finally:
        for server in servers:
            server.stop()
        redis.end()
