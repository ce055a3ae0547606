"""Runs the protocol's own tests of reads: `make test-durable`."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

BUILD = Path("build/durable")
EXCLUDED = "TTL|Fork|Idempotent Producer|Reserved|roducer|dedup"
"""Words in the names of tests that are about producers, forks and lifetimes."""
LEAST = 184


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    app = subprocess.Popen([sys.executable, "-m", "tests.durable.app", str(port)])
    try:
        _wait_for(url)
        shutil.copy(Path(__file__).parent / "conformance.test.mjs", BUILD)
        ended = subprocess.run(
            [
                *("npx", "vitest", "run", "--testTimeout", "30000", "--reporter", "dot"),
                *("--testNamePattern", f"^(?!.*({EXCLUDED}))"),
            ],
            cwd=BUILD,
            env=os.environ | {"DURABLE_URL": url, "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        app.terminate()
        app.wait()
    print(ended.stdout)
    passed = re.search(r"(\d+) passed", ended.stdout.rpartition("Tests")[2])
    if passed is None or int(passed[1]) < LEAST:
        print(f"Fewer than {LEAST} tests ran and passed.")
        return 1
    return ended.returncode


def _wait_for(url: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            httpx.get(f"{url}/v1/stream/none")
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(url)


if __name__ == "__main__":
    sys.exit(main())
