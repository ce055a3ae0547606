"""The doctor's look at what a server needs: port, keys, descriptors, state directory."""

import errno
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.cli.finding import Finding
from headrace.core.config import HttpConfig, ServerConfig

_MIN_DESCRIPTORS = 4096 + 256  # connections, and what the server itself opens
_SLOW_SYNC_MS = 50.0
_HEALTH_TIMEOUT_S = 2.0


def findings(config: ServerConfig) -> Iterator[Finding]:
    yield _port(config.http)
    yield _keys(config.http)
    yield _descriptors()
    yield _state_dir(config)


def _port(http: HttpConfig) -> Finding:
    address = f"{http.host}:{http.port}"
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        socket.create_server((http.host, http.port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding("port", "fail", f"{address}: {error.strerror}", "Give another --host.")
        return _neighbour(http, address)
    return Finding("port", "ok", f"{address} is free")


def _neighbour(http: HttpConfig, address: str) -> Finding:
    """Who has the port: a server of ours, and how it is, or something else."""
    import httpx

    host = "127.0.0.1" if http.host == "0.0.0.0" else http.host
    try:
        answer = httpx.get(f"http://{host}:{http.port}/health", timeout=_HEALTH_TIMEOUT_S)
        state = answer.json()["status"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        detail = f"{address} is in use by something else"
        return Finding("port", "warn", detail, "Stop it, or give --port.")
    verdict = "ok" if answer.status_code == 200 else "warn"
    detail = f"{address} has a running server, whose health is {state!r}"
    return Finding("port", verdict, detail)  # type: ignore[arg-type]


def _keys(http: HttpConfig) -> Finding:
    if http.api_key:
        return Finding("keys", "ok", f"{len(http.api_key)} configured")
    if http.host in ("127.0.0.1", "::1", "localhost"):
        return Finding("keys", "ok", "none, and only this machine is served")
    remedy = "Give it a key with HEADRACE_API_KEYS or --api-key-file."
    return Finding("keys", "warn", f"none, and {http.host} serves other machines", remedy)


def _descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_DESCRIPTORS:
        remedy = f"Raise it for many connections: ulimit -n {_MIN_DESCRIPTORS}"
        return Finding("descriptors", "warn", f"{soft} files at once", remedy)
    return Finding("descriptors", "ok", f"{soft} files at once")


def _state_dir(config: ServerConfig) -> Finding:
    wanted = state_path(config)
    if wanted is None:
        return Finding("state", "ok", "none: streams are kept in memory")
    existing = next(path for path in (wanted, *wanted.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "Give a folder of yours with --state-dir, or none."
        return Finding("state", "fail", f"{wanted} cannot be written", remedy)
    sync_ms = _measure_sync(existing)
    detail = f"{wanted}, {sync_ms:.1f} ms to sync a page"
    if sync_ms > _SLOW_SYNC_MS:
        remedy = "Streams that opted in wait for each sync; a faster disk would help them."
        return Finding("state", "warn", detail, remedy)
    return Finding("state", "ok", detail)


def state_path(config: ServerConfig) -> Path | None:
    """Where the server would keep its streams; None: in memory."""
    given = config.streams.state_dir
    if given is not None:
        return None if given == "none" else Path(given)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "headrace" / str(config.http.port)


def _measure_sync(folder: Path) -> float:
    """Median of a few, with a file that is gone afterwards."""
    taken = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(1000 * (time.perf_counter() - began))
    return sorted(taken)[len(taken) // 2]
