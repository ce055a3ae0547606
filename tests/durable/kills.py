"""Reads answers with another project's client during kills: `make test-durable`.

Each message must arrive once and in the order of the log, and each text must equal that of an
undisturbed server.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tools.harness import processes
from tools.harness.servers import ServerProcess
from tools.harness.tiny_models import make_tiny_model

BUILD = Path("build/durable")
NUM_RUNNING, NUM_TOKENS, NUM_PROMPTS = 6, 400, 12
WITHIN_S = 120.0


class Readers:
    """The client's process, and the messages that it has read by URL."""

    def __init__(self) -> None:
        self.read: dict[str, dict[str, Any]] = {}
        shutil.copy(Path(__file__).parent / "reader.mjs", BUILD)
        self._process = subprocess.Popen(
            ["node", str(BUILD / "reader.mjs")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._gather, daemon=True).start()

    def begin(self, url: str, live: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"url": url, "live": live}) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def has_failed(self) -> bool:
        return self._process.poll() is not None

    def _gather(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            self.read[said["url"]] = said


class Trial:
    def __init__(self, folder: Path, seed: int) -> None:
        self._dice = random.Random(seed)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        model = make_tiny_model(folder / "model")
        state = str(folder / "state")
        self._flags = (
            *("--model", f"model={model}", "--port", str(port), "--state-dir", state),
            *("--max-num-seqs", str(NUM_RUNNING), "--heartbeat-s", "1"),
            *("--dtype", "bfloat16"),  # in which answers do not change after a kill
        )
        self._server = ServerProcess(*self._flags).wait_until_ready()
        self._base = self._server.url
        self._readers = Readers()
        self.urls: dict[str, str] = {}  # prompt by URL
        self.num_kills = 0

    def run(self, kills: int) -> None:
        due = time.monotonic() + 1
        while self.num_kills < kills:
            assert not self._readers.has_failed, "the client gave up"
            while len(self.urls) - len(self._readers.read) < NUM_RUNNING:
                self._begin()
            if time.monotonic() >= due:
                self._kill()
                due = time.monotonic() + self._dice.uniform(0.3, 2.0)
            time.sleep(0.05)
        until = time.monotonic() + WITHIN_S
        while len(self._readers.read) < len(self.urls):
            assert time.monotonic() < until, f"silent: {self.urls.keys() - self._readers.read}"
            time.sleep(0.1)

    def close(self) -> None:
        self._readers.close()
        self._server.stop()

    def _begin(self) -> None:
        prompt = f"say {len(self.urls) % NUM_PROMPTS}"
        body = self._body(prompt) | {"stream": True}
        names = {"Idempotency-Key": f"trial-{len(self.urls)}"}
        address = f"{self._base}/v1/completions"
        with httpx.stream("POST", address, json=body, headers=names, timeout=60) as begun:
            begun.raise_for_status()
            url = f"{self._base}/v1/durable/{begun.headers['x-stream-id']}"
        live = self._dice.choice(("sse", "long-poll"))
        self.urls[url] = prompt
        self._readers.begin(url, live)

    def _kill(self) -> None:
        self.num_kills += 1
        engines = processes.engines(self._server.process.pid)
        if engines and self._dice.random() < 0.5:
            os.kill(engines[0], signal.SIGKILL)
        else:
            os.kill(self._server.process.pid, signal.SIGKILL)
            self._server.stop(signal.SIGKILL)
            self._server = ServerProcess(*self._flags)
        self._server.wait_until_ready()

    @staticmethod
    def _body(prompt: str) -> dict[str, Any]:
        return {"model": "model", "prompt": prompt, "max_tokens": NUM_TOKENS, "seed": 1}

    def check(self) -> str:
        texts = {}
        for prompt in set(self.urls.values()):
            asked = httpx.post(
                f"{self._base}/v1/completions", json=self._body(prompt), timeout=300
            ).raise_for_status()
            texts[prompt] = asked.json()["choices"][0]["text"]
        num_messages = 0
        for url, prompt in self.urls.items():
            items = self._readers.read[url]["items"]
            said = [piece["text"] for item in items for piece in item.get("pieces", ())]
            compare(url, "events", items, self._logged(url))
            compare(url, "text", "".join(said), texts[prompt])
            num_messages += len(items)
        cuts = sum(said["cuts"] for said in self._readers.read.values())
        return (
            f"{self.num_kills} kills, {cuts} cuts, {len(self.urls)} answers, {num_messages} "
            "messages: none lost, repeated, reordered or changed"
        )

    def _logged(self, url: str) -> list[dict[str, Any]]:
        """Return all events of the stream from the server's own route."""
        address, after, events = url.replace("/durable/", "/streams/") + "/events", "", []
        while True:
            page = httpx.get(
                address,
                params={"after": after} if after else {},
                headers={"Accept": "application/json"},
                timeout=60,
            ).raise_for_status()
            said = page.json()
            events += said["events"]
            after = said["next"]
            if said["done"]:
                return events


def compare(url: str, what: str, read: Any, truth: Any) -> None:
    if read != truth:
        first = next((i for i, (a, b) in enumerate(zip(read, truth, strict=False)) if a != b), None)
        lengths = f"{len(read)} read, {len(truth)} expected, the first difference is at {first}"
        raise AssertionError(f"{url}: {what} differ: {lengths}: {read[-3:]} {truth[-3:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-durable-") as name:
        trial = Trial(Path(name), given.seed)
        try:
            trial.run(given.kills)
            print(trial.check())
        finally:
            trial.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
