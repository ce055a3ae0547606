"""Routes that immediately show the state of the server and its models.

The answers contain no prompt, text, stream id or key.
"""

import itertools
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.fleet.load_progress import LoadProgressWatch
from headrace.fleet.model_host import ModelHost
from headrace.gateway.codex_catalog import catalog
from headrace.gateway.http_responses import answer, refuse, speaks_anthropic
from headrace.gateway.listing import ANTHROPIC_PAGING, page
from headrace.gateway.metrics_routes import FigureRoutes
from headrace.gateway.model_entries import anthropic_entry, entry_of
from headrace.gateway.model_view import status_of, view_named, views_of
from headrace.gateway.polled_events import PolledState, Watch
from headrace.generation.generation import Generation
from headrace.generation.stream import LiveStream
from headrace.metrics.metrics import kind_of
from headrace.protocols.dialect import encode
from headrace_common.config.settings import HttpConfig
from headrace_common.errors import RequestError
from headrace_common.messages import Ready, Status, StepTrace
from headrace_common.version import __version__

_MAX_ROWS = 256
_HEARTBEAT = b"event: heartbeat\ndata: {}\n\n"

Snapshot = dict[str, Any]

UNAVAILABLE = {
    "loading": RequestError("model_loading", "Loading model"),
    "draining": RequestError("server_shutdown", "The server is shutting down."),
    "dead": RequestError("engine_failed", "The engine stopped for good."),
}


class StateRoutes:
    def __init__(self, generation: Generation, config: HttpConfig) -> None:
        self._generation = generation
        self._config = config

    async def live(self, request: Request) -> ASGIApp:
        return answer({"status": "ok"})

    async def health(self, request: Request) -> ASGIApp:
        state = self._generation.state
        if state == "loading":
            return unhealthy(state, loading=loading_of(self._generation.fleet.hosts.first.loading))
        if state in UNAVAILABLE:
            return unhealthy(state)
        return answer({"status": state} | ages(self._generation))

    async def version(self, request: Request) -> ASGIApp:
        return answer({"version": __version__})

    async def models(self, request: Request) -> ASGIApp:
        served = views_of(self._generation.fleet.hosts)
        if speaks_anthropic(request.scope):
            listed = page(request, served, anthropic_entry, ANTHROPIC_PAGING)
            del listed["object"]
            return answer(listed)
        has_states = self._generation.fleet.pinned is None
        entries = [entry_of(one, has_states) for one in served]
        return answer({"object": "list", "data": entries, "models": catalog(served)})

    async def model(self, request: Request) -> ASGIApp:
        one = view_named(self._generation.fleet.hosts, request.path_params["id"])
        if speaks_anthropic(request.scope):
            return answer(anthropic_entry(one))
        return answer(entry_of(one, has_states=self._generation.fleet.pinned is None))

    async def metrics(self, request: Request) -> ASGIApp:
        generation = self._generation
        models = {}
        if generation.fleet.pinned is None:
            # A server that started with one model uses one Metrics for itself and for this model.
            hosts = [
                it for it in generation.fleet.hosts.all() if it.metrics is not generation.metrics
            ]
            models = {host.name: host.metrics for host in hosts}
        vllm_model = generation.fleet.hosts.first.names[0] if self._config.vllm_metrics else ""
        streams = ((it.state, it.num_readers, it.silent_s) for it in generation.streams)
        text = generation.metrics.text(generation.state, streams, vllm_model, models)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def ages(generation: Generation) -> dict[str, float | None]:
    """Return the seconds since the last step of any engine, and the longest silence of a stream.

    The silence of a live stream is the time since the stream's last event; heartbeats do not
    count. A value is None if there was no step, or if there is no live stream.
    """
    steps = (host.engine.last_step_age_s for host in generation.fleet.hosts.all())
    step_s = min((age for age in steps if age is not None), default=None)
    silent_s = max((stream.silent_s for stream in generation.streams), default=None)
    shown = {"last_step_age_s": step_s, "silent_stream_age_s": silent_s}
    return {name: None if age is None else round(age, 1) for name, age in shown.items()}


def unhealthy(state: str, **more: Any) -> Response:
    """Answer with status 503 and the reason; `more` adds fields to the body."""
    error = UNAVAILABLE[state]
    shown: dict[str, Any] = {"message": error.message, "type": error.kind.type}
    # Clients that wait for a model to load expect this format.
    if state == "loading":
        shown = {"code": error.kind.status, **shown}
    else:
        shown |= {"param": None, "code": error.code}
    body = encode({"status": state, "error": shown, **more})
    return Response(body, 503, _without_length(refuse(error)), "application/json")


def loading_of(watch: LoadProgressWatch) -> dict[str, Any] | None:
    """Return the current load progress as JSON, or None if nothing is loading."""
    if (now := watch.progress) is None:
        return None
    figures = {"progress": now.share, "detail": now.detail, "since_s": round(now.seconds, 1)}
    return {"stage": now.stage, **figures}


def _without_length(response: Response) -> dict[str, str]:
    return {k: v for k, v in response.headers.items() if not k.startswith("content-")}


def stall_target(host: ModelHost) -> Snapshot:
    """Return the stall target of the last step in milliseconds, and why it has this value."""
    ready = host.ready
    if ready is None or ready.max_stall_s is None:
        return {"stall_target_ms": None, "stall_target_reason": ""}
    last = next((it.stall_target for it in reversed(host.engine.steps)), None)
    target, base = last or ready.max_stall_s, f"{1000 * ready.max_stall_s:g} ms"
    if ready.highest_stall_s == ready.max_stall_s:
        reason = "set by --max-stall-ms"
    elif target == ready.max_stall_s:
        reason = "the default"
    else:
        reason = f"raised from {base}: shorter steps would process prompts too slowly"
    return {"stall_target_ms": round(1000 * target), "stall_target_reason": reason}


class ManageRoutes:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.figures = FigureRoutes(generation)
        self._began = time.monotonic()
        self._watched = PolledState(lambda: snapshot(generation), self.changed)

    async def state(self, request: Request) -> ASGIApp:
        return answer(self._with_uptime(snapshot(self._generation)))

    async def stream(self, request: Request) -> ASGIApp:
        return Watch(self._watched, _HEARTBEAT)

    def changed(self, before: Snapshot | None, now: Snapshot) -> bytes:
        """Return the event for a changed snapshot, or nothing if only the times have changed."""
        if now == before:
            return b""
        return b"event: state\ndata: " + encode(self._with_uptime(now)) + b"\n\n"

    async def drain(self, request: Request) -> ASGIApp:
        """Stop admitting requests. Running requests continue, and the server stays up."""
        self._generation.queues.stop()
        return answer({"status": self._generation.state, "streams": len(self._generation.streams)})

    async def replace(self, request: Request) -> ASGIApp:
        """Start to replace an engine. The new engine appears in the state under the next number."""
        host = self._generation.fleet.hosts.get(request.query_params.get("model"))
        number = request.query_params.get("replica", "")
        if number not in (str(it.number) for it in host.engine.replicas):
            message = "replica must be the number of an engine in /manage/state."
            raise RequestError("invalid_value", message, "replica")
        self._generation.fleet.replace(host, int(number))
        return answer({"status": "replacing"})

    async def admit_again(self, request: Request) -> ASGIApp:
        """End a drain, unless the server is shutting down."""
        self._generation.queues.admit_again()
        return answer({"status": self._generation.state, "streams": len(self._generation.streams)})

    def _with_uptime(self, shown: Snapshot) -> Snapshot:
        uptime_s = round(time.monotonic() - self._began, 1)
        return {"uptime_s": uptime_s} | ages(self._generation) | shown


def snapshot(generation: Generation) -> Snapshot:
    """Return the whole state without the values that change all the time, such as ages."""
    hosts = generation.fleet.hosts.all()
    shown = {"state": generation.state, "version": __version__, **_snapshot(hosts[0])}
    if generation.fleet.pinned is None:
        shown["models"] = [{"status": status_of(host), **_snapshot(host)} for host in hosts]
    rows = (_row(host, stream) for host in hosts for stream in generation.streams_of(host))
    shown["requests"] = list(itertools.islice(rows, _MAX_ROWS))
    return shown


def _row(host: ModelHost, stream: LiveStream) -> Snapshot:
    """Describe a request that waits or runs.

    No other route uses the number that is shown for the request.
    """
    choice_progress = stream.choice_progress().values()
    return {
        "number": stream.number,
        "model": host.name,
        "state": stream.state,
        "created": stream.record.created,
        "prompt_tokens": stream.record.num_prompt_tokens,
        "prompt_processed": sum(one.num_processed for one in choice_progress),
        "prompt_cached": sum(one.num_cached for one in choice_progress),
        "tokens": stream.tally.usage.completion_tokens,
        "tokens_left": _sum(one.num_left for one in choice_progress),
        "choices": stream.record.request.num_choices,
        "max_gap_ms": stream.tally.timings.max_gap_ms,
        "readers": stream.num_readers,
    }


def _sum(numbers: Iterable[int | None]) -> int | None:
    """Return the sum; None if there are no numbers, or if one of the numbers is None."""
    found = list(numbers)
    known = [number for number in found if number is not None]
    return sum(known) if known and len(known) == len(found) else None


def _snapshot(host: ModelHost) -> Snapshot:
    """Return the snapshot of one model."""
    status = host.engine.status
    return {
        "engine": _engine(host),
        "model": host.name,
        "running": status.num_running if status else 0,
        "waiting": {
            "requests": status.num_waiting if status else 0,
            "tokens": status.num_waiting_tokens if status else 0,
        },
        "missed": status.missed if status else {},
        "num_steps": status.num_steps if status else 0,
        "guessed": {
            "tokens": status.num_guessed if status else 0,
            "accepted": status.num_accepted if status else 0,
            "drafted": status.num_drafted if status else 0,
            "drafted_right": status.num_drafted_right if status else 0,
        },
        "steps": [_step(step) for step in host.engine.steps],
        "replicas": _replicas(host),
        **_memory(host.ready, status),
    }


def _replicas(host: ModelHost) -> list[Snapshot]:
    """Describe the engines of a model that runs on several engines."""
    return [
        {
            "number": it.number,
            "state": "up" if it.up else "down",
            "node": it.up.node if it.up else "",
            "pid": it.up.pid if it.up else None,
            "starts": it.num_starts,
            "places": it.up.ready.max_num_seqs if it.up else 0,
            "taken": it.num_taken,
            "running": it.status.num_running if it.status else 0,
            "blocks_free": it.status.blocks_free if it.status else None,
        }
        for it in host.engine.replicas
    ]


def _engine(host: ModelHost) -> Snapshot:
    ready = host.ready
    shown: Snapshot = {
        "state": "up" if host.engine.up else "down",
        "pid": host.engine.up.pid if host.engine.up else None,
        "starts": host.engine.num_starts,
        "last_words": host.engine.last_words,
    }
    if ready is None:
        return shown
    return shown | {
        "lane": ready.lane,
        "device": ready.device,
        "dtype": ready.dtype,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "kernels": ready.kernels,
        "fingerprint": ready.fingerprint,
        "max_model_len": ready.max_model_len,
        "max_num_seqs": ready.max_num_seqs,
        "max_step_tokens": ready.max_step_tokens,
        **stall_target(host),
    }


def _memory(ready: Ready | None, status: Status | None) -> Snapshot:
    if ready is None:
        return {}
    layout = ready.layout
    blocks_free = status.blocks_free if status else layout.num_blocks
    slots_free = status.slots_free if status else layout.num_slots
    return {
        "blocks": {"total": layout.num_blocks, "free": blocks_free, "size": layout.block_size},
        "slots": {"total": layout.num_slots, "free": slots_free},
    }


def _step(step: StepTrace) -> Snapshot:
    return {
        "kind": kind_of(step),
        "decoding": step.num_decoding,
        "prompt_tokens": step.num_prompt_tokens,
        "predicted_ms": round(1000 * step.predicted, 2),
        "actual_ms": round(1000 * step.actual, 2),
        "elapsed_ms": round(1000 * step.elapsed, 2),
        "room_ms": None if step.room is None else round(1000 * step.room, 2),
        "cause": step.cause,
    }
